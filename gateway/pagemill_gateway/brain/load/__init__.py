"""What the operator is given of each deployment: demand, queue and load of the engines."""
