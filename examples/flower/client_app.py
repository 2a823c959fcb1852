"""A node."""

import task

from fedjax_inv import flower

app = flower.client_app(task.algorithm, task.model, task.examples, task.validation)
