"""One parser a format of answers; `answers.registry` lists them."""
