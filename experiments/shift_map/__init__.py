"""The map of `fedjax-inv map`: methods as rows, kinds of shift as columns, and words for cells."""
