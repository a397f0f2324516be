//! `quintctl exec`: runs a command in a container.

use std::process::ExitCode;

use quintlet_cri_api::v1::ExecRequest;
use quintlet_kit::args::paths::Paths;

use super::session::{self, Wanted};
use super::{cri, pod, running};
use crate::error::Error;

/// Run a command in a container.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ExecArgs {
    /// Pod: name, NAMESPACE/NAME or UID
    pub(crate) pod: String,
    /// Container [default: the annotation kubectl.kubernetes.io/default-container, or the first]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) container: Option<String>,
    /// Pass standard input to the command
    #[arg(short = 'i', long)]
    pub(crate) stdin: bool,
    /// Allocate a terminal for the command
    #[arg(short = 't', long)]
    pub(crate) tty: bool,
    /// Command and arguments, after --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

/// Runs the command and returns its exit code.
///
/// # Errors
/// The container does not exist or is not running; a service does not answer; the connection closed.
pub(crate) async fn run(args: ExecArgs, paths: &Paths) -> Result<ExitCode, Error> {
    let wanted = Wanted { stdin: args.stdin, tty: args.tty };
    wanted.check()?;
    let container = running(&pod(paths, &args.pod).await?, args.container.as_deref())?;
    let (peer, mut client) = cri(paths).await?;
    let request = ExecRequest {
        container_id: container.id,
        cmd: args.command,
        tty: wanted.tty,
        stdin: wanted.stdin,
        stdout: true,
        stderr: !wanted.tty,
    };
    let url = peer.call(client.exec(request)).await?.url;
    session::run(&url, wanted).await
}
