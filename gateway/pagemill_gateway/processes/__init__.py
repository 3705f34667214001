"""The processes of a gateway with several workers: who starts whom, what each is given, and how it ends."""
