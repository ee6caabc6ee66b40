"""Turns a description of a job (model, layout, device, no trace) into the step that it would run, lane by lane."""
