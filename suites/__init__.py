"""WHAT is checked: cases, model, data, reference, paths, observations, oracles, verdict. Imports no other room."""
