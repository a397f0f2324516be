//! `quintctl retry`: has a pod tried at once that waits after a panic or a death of a service in its work.

use quintlet_kit::paths::Paths;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{RetryReply, RetryRequest};
use serde::Serialize;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};
use crate::text::clean;

/// Which pod.
#[derive(Debug, Clone, clap::Args)]
pub struct RetryArgs {
    /// Name, NAMESPACE/NAME or UID
    pub pod: String,
}

/// Runs the command.
///
/// # Errors
/// There is no such pod, this user may not, pod-sync does not answer, or nobody reads.
pub async fn run(args: RetryArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?);
    let reply = peer.answer(client.retry(RetryRequest { pod: args.pod.clone() })).await?;
    print(format.render(&data(&reply), |_| render(&args.pod, &reply))?)
}

fn render(pod: &str, reply: &RetryReply) -> String {
    let what = if reply.waited { "is tried again now" } else { "does not wait after an internal error" };
    format!("pod {} (uid {}) {what}\n", clean(pod), clean(&reply.uid))
}

#[derive(Debug, Serialize)]
struct Data {
    uid: String,
    waited: bool,
}

fn data(reply: &RetryReply) -> Data {
    Data { uid: reply.uid.clone(), waited: reply.waited }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_says_whether_the_pod_waited() {
        let reply = |waited| RetryReply { uid: "u1".to_owned(), waited };
        assert_eq!(render("web", &reply(true)), "pod web (uid u1) is tried again now\n");
        assert_eq!(render("web", &reply(false)), "pod web (uid u1) does not wait after an internal error\n");
    }
}
