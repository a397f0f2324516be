//! `quintctl attach`: the streams of a container's own process.

use std::process::ExitCode;

use k8s_cri::v1::AttachRequest;
use quintlet_kit::paths::Paths;

use super::session::{self, Wanted};
use super::{cri, pod, running};
use crate::error::Error;

/// The output of a container's process as it comes, and its input.
#[derive(Debug, Clone, clap::Args)]
pub struct AttachArgs {
    /// Name, NAMESPACE/NAME or UID
    pub pod: String,
    /// Container [default: the annotation kubectl.kubernetes.io/default-container, or the first]
    #[arg(short, long, value_name = "NAME")]
    pub container: Option<String>,
    /// Pass standard input to the process, where the container has one
    #[arg(short = 'i', long)]
    pub stdin: bool,
}

/// Runs until the process ends.
///
/// # Errors
/// No such pod or container, or it does not run; it has no standard input; a service does not answer; the connection broke.
pub async fn run(args: AttachArgs, paths: &Paths) -> Result<ExitCode, Error> {
    let container = running(&pod(paths, &args.pod).await?, args.container.as_deref())?;
    if args.stdin && !container.stdin {
        return Err(Error::NotFound(format!(
            "container {} has no standard input (stdin: true)",
            container.name
        )));
    }
    // Whether there is a terminal is the container's own matter.
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
    let url = peer.answer(client.attach(request)).await?.url;
    session::run(&url, wanted).await
}
