//! `quintctl attach`: connects to the streams of a container's main process.

use std::process::ExitCode;

use quintlet_cri_api::v1::AttachRequest;
use quintlet_kit::args::paths::Paths;

use super::session::{self, Wanted};
use super::{cri, pod, running};
use crate::error::Error;

/// Attach to the main process of a container.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct AttachArgs {
    /// Pod: name, NAMESPACE/NAME or UID
    pub(crate) pod: String,
    /// Container [default: the annotation kubectl.kubernetes.io/default-container, or the first]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) container: Option<String>,
    /// Pass standard input to the process, if the container has stdin: true
    #[arg(short = 'i', long)]
    pub(crate) stdin: bool,
}

/// Runs until the container's process exits, and returns its exit code.
///
/// # Errors
/// The container does not exist, is not running or has no standard input; a service does not answer; the
/// connection closed.
pub(crate) async fn run(args: AttachArgs, paths: &Paths) -> Result<ExitCode, Error> {
    let container = running(&pod(paths, &args.pod).await?, args.container.as_deref())?;
    if args.stdin && !container.stdin {
        return Err(Error::NotFound(format!(
            "container {} has no standard input; set stdin: true in its spec",
            container.name
        )));
    }
    // The container's spec decides whether its process has a terminal.
    let wanted = Wanted { stdin: args.stdin, tty: container.tty };
    wanted.check()?;
    let (peer, mut client) = cri(paths).await?;
    let request = AttachRequest {
        container_id: container.id,
        stdin: wanted.stdin,
        tty: wanted.tty,
        stdout: true,
        stderr: !wanted.tty,
    };
    let url = peer.call(client.attach(request)).await?.url;
    session::run(&url, wanted).await
}
