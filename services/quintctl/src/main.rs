//! The `quintctl` binary.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use quintctl::{image, up};

/// Operate Quintlet on this machine.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the five services on this machine until interrupted
    Up(Box<up::UpArgs>),
    /// Work with images
    Image {
        /// Directory of the services' sockets
        #[arg(long, value_name = "DIR", default_value = "/run/quintlet")]
        run_dir: PathBuf,
        #[command(flatten)]
        args: image::ImageArgs,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let done = match quintlet_kit::args::parse::<Cli>().command {
        Command::Up(args) => Box::pin(up::run(*args)).await.map_err(anyhow::Error::from),
        Command::Image { run_dir, args } => {
            image::run(args, &run_dir).await.map(|()| ExitCode::SUCCESS).map_err(anyhow::Error::from)
        }
    };
    done.unwrap_or_else(|e| {
        // Without a standard error there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "quintctl: {}", quintlet_kit::error_chain(e.as_ref()));
        ExitCode::FAILURE
    })
}
