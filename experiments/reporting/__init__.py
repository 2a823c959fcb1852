"""What finished runs are shown as: tables and figures."""
