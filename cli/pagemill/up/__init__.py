"""The parts of `pagemill up`: reading the files, planning their deployments, and running the plans.

`documents` reads YAML with line numbers, `messages` words validation errors, `loading` checks everything and reports
all errors at once; `session` runs the plans, `screen` shows what happens, `answer` sends the first question.
"""
