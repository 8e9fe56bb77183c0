"""Drivers: graphs on a device. `interface` says what pgraph asks of one, `choice` picks one for a graph."""
