//! The binary of the tests' CSI driver.

use clap::Parser as _;
use quintlet_csi_driver::serve::{Args, serve};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // The driver ends with the test that started it.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    serve(args).await
}
