"""What the load stream publishes of each deployment: demand, queue and load of the engines."""
