//! `quintctl pods`: the pods of this node and what each pod waits for.

use std::path::PathBuf;

use quintctl_text::now_ns;
use quintlet_kit::args::paths::Paths;
use quintlet_proto::podsync::v1::ListPodsRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};
use crate::pods::{data, render, sort};
use crate::screen;

/// List the pods of this node.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct PodsArgs {
    /// Only pods of this namespace
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,
    /// Show a live table with keys for logs, explanations and traces
    #[arg(short, long, conflicts_with = "namespace")]
    pub(crate) watch: bool,
    /// Directory of the containers' logs, for --watch [default: the default of quintctl logs]
    #[arg(long, value_name = "DIR", env = "QUINTLET_POD_LOGS_DIR")]
    pub(crate) pod_logs_dir: Option<PathBuf>,
}

pub(crate) async fn run(args: PodsArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    let peer = Peer::pod_sync(paths);
    if args.watch {
        peer.channel().await?;
        if !screen::is_possible() {
            return Err(Error::NoTerminal);
        }
        let places = screen::Places {
            paths: paths.clone(),
            pod_logs_dir: crate::logs::pod_logs_dir(args.pod_logs_dir, paths.run()),
        };
        return Box::pin(screen::follow(places, |_| screen::plain_header(paths.run()))).await;
    }
    let brief = matches!(format, Format::Table | Format::Wide);
    let mut client = PodSyncClient::new(peer.channel().await?);
    let mut reply = peer.list(client.list_pods(ListPodsRequest { brief })).await?;
    if let Some(namespace) = &args.namespace {
        reply.pods.retain(|p| p.namespace == *namespace);
    }
    sort(&mut reply.pods);
    print(format.render(&data(&reply), |wide| render(&reply, now_ns(), wide))?)
}
