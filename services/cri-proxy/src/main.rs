//! The `cri-proxy` binary.

fn main() -> anyhow::Result<()> {
    cri_proxy::main()
}
