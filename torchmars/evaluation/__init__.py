"""How good a model is: its answers to public tasks, its loss on texts, and text that it writes.

Read these in order: questions (`tasks`), where they come from (`rows`), log-likelihoods of texts
(`scoring`), and what is made of them (`results`, `texts`).
"""
