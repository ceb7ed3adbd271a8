"""What a model can do: its log-likelihoods of answers to the questions of public tasks.

Read these in order: questions (`tasks`), where they come from (`rows`), log-likelihoods of texts
(`scoring`), and what is made of them (`results`).
"""
