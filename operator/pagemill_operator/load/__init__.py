"""The load stream as the operator hears it: `reader` follows one gateway, `book` keeps what all said, `held` compares."""
