"""Sample captures that ship, and the synthesizer that writes Kineto files for a described job."""
