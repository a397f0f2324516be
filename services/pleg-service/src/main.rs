//! The `pleg-service` binary.

fn main() {}
