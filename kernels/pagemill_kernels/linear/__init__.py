"""Linear layers: y = x W^T + b over weights packed once for the device."""
