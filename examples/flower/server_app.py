"""The server."""

import task

from fedjax_inv import flower

app = flower.server_app(
    task.algorithm, task.model, task.example, "results", score_every=1, **task.RUN
)
