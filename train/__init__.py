"""Still empty: data, the LightningModule and the recipes that train the scorers go here."""
