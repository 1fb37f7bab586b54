"""Still empty: targets of future attention, boundary loss, scorers and learned policies go here."""
