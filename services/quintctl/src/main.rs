//! The `quintctl` binary.

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
async fn main() -> anyhow::Result<ExitCode> {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            e.print()?;
            return Ok(if e.use_stderr() { ExitCode::from(64) } else { ExitCode::SUCCESS });
        }
    };
    match cli.command {
        Command::Up(args) => Ok(Box::pin(up::run(*args)).await?),
        Command::Image { run_dir, args } => {
            image::run(args, &run_dir).await?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
