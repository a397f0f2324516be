//! Tests of the built binaries on a real runtime.
