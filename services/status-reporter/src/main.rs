//! The `status-reporter` binary.

fn main() -> anyhow::Result<()> {
    status_reporter::main()
}
