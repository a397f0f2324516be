//! The `cri-proxy` binary.

fn main() {}
