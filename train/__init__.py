"""Training of the scorers: recipes, data, the teacher's pass, and a LightningModule around them."""
