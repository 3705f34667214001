"""What `pagemill bench` is made of: the texts that it sends, how it sends them, and what it says of the answers."""
