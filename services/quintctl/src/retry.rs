//! `quintctl retry`: ends the back-off of a pod whose worker panicked, or whose work crashed pod-sync.

use quintctl_text::clean;
use quintlet_kit::args::paths::Paths;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{RetryReply, RetryRequest};
use serde::Serialize;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};

/// Retry a pod now that waits with reason InternalError.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct RetryArgs {
    /// Pod: name, NAMESPACE/NAME or UID
    pub(crate) pod: String,
}

/// Sends the retry request and prints the result.
///
/// # Errors
/// The pod does not exist, the caller is not permitted, or pod-sync does not answer.
pub(crate) async fn run(args: RetryArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?);
    let reply = peer.call(client.retry(RetryRequest { pod: args.pod.clone() })).await?;
    print(format.render(&data(&reply), |_| render(&args.pod, &reply))?)
}

fn render(pod: &str, reply: &RetryReply) -> String {
    let what = if reply.waited { "is retried now" } else { "does not wait with reason InternalError" };
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
    fn retry_reports_whether_the_pod_was_in_a_back_off() {
        let reply = |waited| RetryReply { uid: "u1".to_owned(), waited };
        assert_eq!(render("web", &reply(true)), "pod web (uid u1) is retried now\n");
        assert_eq!(
            render("web", &reply(false)),
            "pod web (uid u1) does not wait with reason InternalError\n"
        );
    }
}
