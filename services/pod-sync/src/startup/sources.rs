//! Starts the sources of pods and makes the pod manager that reads them.

use std::sync::Arc;

use futures::FutureExt as _;
use pod_sync_layout::SourceKind;
use pod_sync_offline::OfflineCache;
use pod_sync_records::PodRecord;
use pod_sync_sources::adoption::StaticSandbox;
use pod_sync_sources::api::ClusterView;
use pod_sync_sources::file::ManifestReader;
use pod_sync_sources::http::{ManifestUrl, Transport};
use pod_sync_sources::static_uids::StaticPodUids;
use pod_sync_sources::{SourceEvent, SourceMessage, SourceSender};
use pod_sync_worker::context::WorkerContext;
use quintlet_model::ids::PodUid;
use tokio::sync::mpsc;

use super::api::ApiAccess;
use super::process_tasks::ProcessTasks;
use crate::admission::{NodeAdmission, NodeConditions};
use crate::args::Args;
use crate::pod_manager::PodManager;

/// Starts the sources of pods.
pub(crate) struct SourceTasks<'a> {
    pub(super) tasks: &'a ProcessTasks,
    pub(super) ctx: &'a Arc<WorkerContext>,
    pub(super) args: &'a Args,
    pub(super) api: &'a ApiAccess,
}

impl SourceTasks<'_> {
    /// Starts the sources. Returns the pod manager and the queue that it reads. Static pods in the records
    /// keep their UID.
    pub(crate) fn pod_manager(
        &self,
        conditions: NodeConditions,
        records: &[(PodUid, PodRecord)],
    ) -> (PodManager, mpsc::Receiver<SourceMessage>) {
        let (sources, kinds) = self.start_sources(records);
        let admission = NodeAdmission::new(
            (*self.ctx.node.settings).clone(),
            &self.args.labels(),
            Arc::clone(&self.api.cluster),
            self.api.client.clone(),
            self.ctx.runtime.state.clone(),
            conditions,
        );
        let environment = &self.ctx.environment;
        let admission = admission.with_devices(environment.devices.clone());
        let admission = Arc::new(admission.with_placement(environment.placement.clone()));
        let manager =
            PodManager::new(Arc::clone(self.ctx), Arc::clone(&self.api.manifests), admission, &kinds);
        (manager, sources)
    }

    fn start_sources(
        &self,
        records: &[(PodUid, PodRecord)],
    ) -> (mpsc::Receiver<SourceMessage>, Vec<SourceKind>) {
        let (args, stop) = (self.args, &self.tasks.stop);
        let node = &self.ctx.node.settings.node_name;
        let (tx, rx) = quintlet_kit::queue::channel("pod-sources", pod_sync_sources::SOURCE_QUEUE);
        let mut kinds = Vec::new();
        if let Some(path) = &args.manifests {
            kinds.push(SourceKind::File);
            // Blocks: there is no pod before the start.
            let uids = StaticPodUids::open(&args.root_dir, recorded(records, "file"));
            let run = pod_sync_sources::file::run(
                ManifestReader::new(path.clone(), node.clone(), uids),
                Some(Arc::new(self.ctx.runtime.calls.clone())),
                args.file_check_frequency,
                tx.clone(),
                stop.clone(),
            );
            self.tasks.spawn("source-file", run);
        }
        if let Some(url) = &args.manifest_url {
            kinds.push(SourceKind::Http);
            let manifests = ManifestUrl {
                url: url.clone(),
                headers: args.manifest_url_header.clone(),
                node: node.clone(),
            };
            let run = pod_sync_sources::http::run(
                manifests,
                args.http_check_frequency,
                Transport::system(),
                Some(Arc::new(self.ctx.runtime.calls.clone())),
                recorded(records, "http"),
                tx.clone(),
                stop.clone(),
            );
            self.tasks.spawn("source-http", run);
        }
        if let Some(client) = self.api.client.clone() {
            kinds.push(SourceKind::Api);
            if let Some(offline) = self.api.offline.clone() {
                let start = start_offline(offline, Arc::clone(&self.api.cluster), tx.clone());
                // Cancellation drops a message without a reader.
                self.tasks.spawn("offline-start", stop.clone().run_until_cancelled_owned(start).map(drop));
            }
            let run = pod_sync_sources::api::run(client, node.clone(), tx, stop.clone());
            self.tasks.spawn("source-api", run);
        } else {
            // Without any source, the queue stays open: the sync loop still runs the restored pods.
            let stop = stop.clone();
            self.tasks.spawn("sources-open", async move {
                stop.cancelled().await;
                drop(tx);
            });
        }
        (rx, kinds)
    }
}

/// Gives the pods of the cache to the sync loop once the API server is away. The sync loop ignores them if it
/// has the pods of the API server.
async fn start_offline(offline: Arc<OfflineCache>, cluster: Arc<ClusterView>, out: SourceSender) {
    if !offline.start_due().await {
        return;
    }
    if let Some(node) = offline.node() {
        cluster.set_known_node(Arc::unwrap_or_clone(node));
    }
    let pods = offline.starts();
    tracing::info!(pods = pods.len(), "API server is away, starting pods of the offline cache");
    // A queue without a reader means that this process ends.
    let _ = out.send((SourceKind::Api, SourceEvent::Offline(pods))).await;
}

/// Returns the pods of a source in the records, as its annotation names it.
fn recorded(records: &[(PodUid, PodRecord)], source: &str) -> Vec<StaticSandbox> {
    let of_source = |(uid, record): &(PodUid, PodRecord)| {
        StaticSandbox::of_record(uid, record.pod.as_deref()?, record.accepted, source)
    };
    records.iter().filter_map(of_source).collect()
}
