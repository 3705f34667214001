"""The parts of `pagemill up`: files to documents, documents to plans, and the session that runs them.

`documents` reads YAML with line numbers, `messages` puts validation errors into words, `loading` checks everything and
reports all errors at once; `session` runs the result, `screen` shows it, `answer` asks the first question.
"""
