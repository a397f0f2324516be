//! Tries sockets as one user, for the test of socket permissions: `connect UID GID GROUPS SOCKET...`, where
//! GROUPS is a comma-separated list or `-`. Prints a line `SOCKET OUTCOME` for each.
//! `connect UID GID GROUPS serve SOCKET` listens instead. `connect UID GID GROUPS retry SOCKET` prints the
//! status code of `PodSync.Retry` for a pod that does not exist.
//!
//! OUTCOME is `all` if every method may be called, `health` if only health and metrics may, or `nothing`.
#![allow(clippy::print_stdout, reason = "it is what the test reads")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
use quintlet_proto::debug::v1::BuildRequest;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::podsync::v1::RetryRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

/// Timeout of a call.
const ANSWER: Duration = Duration::from_secs(10);

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [uid, gid, groups, rest @ ..] = words.as_slice() else {
        anyhow::bail!("want UID GID GROUPS SOCKET...");
    };
    let ids = |list: &str| -> anyhow::Result<Vec<Gid>> {
        let listed = list.split(',').filter(|id| *id != "-");
        listed.map(|id| Ok(Gid::from_raw(id.parse()?))).collect()
    };
    // Before a second thread exists.
    setgroups(&ids(groups)?)?;
    setgid(Gid::from_raw(gid.parse()?))?;
    setuid(Uid::from_raw(uid.parse()?))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        if let [serve, socket] = rest
            && serve == "serve"
        {
            let _listener = tokio::net::UnixListener::bind(socket).context(socket.clone())?;
            println!("listening");
            return std::future::pending().await;
        }
        if let [retry, socket] = rest
            && retry == "retry"
        {
            let mut client = PodSyncClient::new(quintlet_kit::socket::channel(socket.into()));
            let call = client.retry(RetryRequest { pod: "default/no-such-pod".to_owned() });
            let answer = tokio::time::timeout(ANSWER, call).await.context("no answer")?;
            println!("{:?}", answer.map_or_else(|status| status.code(), |_| Code::Ok));
            return Ok(());
        }
        for socket in rest {
            println!("{socket} {}", outcome(Path::new(socket)).await);
        }
        Ok(())
    })
}

async fn outcome(socket: &Path) -> &'static str {
    match (health(socket.to_owned()).await, reflection(socket.to_owned()).await) {
        (true, true) => "all",
        (true, false) => "health",
        (false, false) => "nothing",
        (false, true) => "all but health",
    }
}

/// Returns whether health responds, whatever its status, and debug.v1 if the socket has it.
async fn health(socket: PathBuf) -> bool {
    let channel = quintlet_kit::socket::channel(socket);
    let mut client = HealthClient::new(channel.clone());
    let call = tokio::time::timeout(ANSWER, client.check(HealthCheckRequest::default())).await;
    let mut debug = DebugClient::new(channel);
    let built = tokio::time::timeout(ANSWER, debug.build(BuildRequest {})).await;
    // cri-proxy's socket for probes does not have debug.v1.
    let debug = match &built {
        Ok(Err(status)) => status.code() == Code::PermissionDenied && status.message().contains("socket"),
        answer => matches!(answer, Ok(Ok(_))),
    };
    matches!(call, Ok(Ok(_))) && debug
}

/// Returns whether a method responds that is neither health nor debug.v1.
async fn reflection(socket: PathBuf) -> bool {
    let mut client = ServerReflectionClient::new(quintlet_kit::socket::channel(socket));
    let request = ServerReflectionRequest {
        message_request: Some(MessageRequest::ListServices(String::new())),
        ..ServerReflectionRequest::default()
    };
    let call = async {
        let mut replies = client.server_reflection_info(tokio_stream::once(request)).await?.into_inner();
        replies.message().await
    };
    matches!(tokio::time::timeout(ANSWER, call).await, Ok(Ok(Some(_))))
}
