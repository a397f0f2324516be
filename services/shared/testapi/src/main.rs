//! The `testapi` binary.
fn main() {}
