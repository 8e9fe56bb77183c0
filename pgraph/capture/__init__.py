"""From a partition's code to a template with execs: two recordings on ghost memory, matched and planned."""
