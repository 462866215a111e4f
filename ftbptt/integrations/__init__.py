"""Where this package meets others; each module is imported only when it is asked for."""
