//! `quintctl exec`: a command in a container.

use std::process::ExitCode;

use k8s_cri::v1::ExecRequest;
use quintlet_kit::paths::Paths;

use super::session::{self, Wanted};
use super::{cri, pod, running};
use crate::error::Error;

/// A command in a container.
#[derive(Debug, Clone, clap::Args)]
pub struct ExecArgs {
    /// Name, NAMESPACE/NAME or UID
    pub pod: String,
    /// Container [default: the annotation kubectl.kubernetes.io/default-container, or the first]
    #[arg(short, long, value_name = "NAME")]
    pub container: Option<String>,
    /// Pass standard input to the command
    #[arg(short = 'i', long)]
    pub stdin: bool,
    /// Give the command a terminal
    #[arg(short = 't', long)]
    pub tty: bool,
    /// The command and its arguments, after --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Runs the command; its exit code.
///
/// # Errors
/// No such pod or container, or it does not run; a service does not answer; the connection broke.
pub async fn run(args: ExecArgs, paths: &Paths) -> Result<ExitCode, Error> {
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
    let url = peer.answer(client.exec(request)).await?.url;
    session::run(&url, wanted).await
}
