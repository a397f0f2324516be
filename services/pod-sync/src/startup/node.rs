//! Starts the reports about the Node object and the watches of cluster objects.

use std::sync::Arc;

use pod_sync_node_certificates::{ClientCertificate, ServingCertificate};
use pod_sync_node_object::NodeChannels;
use pod_sync_worker::context::WorkerContext;
use quintlet_kit::args::paths::Paths;
use tokio::sync::watch;

use super::api::ApiAccess;
use super::node_name::NameCheck;
use super::process_tasks::ProcessTasks;
use crate::admission::NodeConditions;
use crate::args::Args;
use crate::node_client::SERVING_COPY;
use crate::start_refusal::StartRefusal;

/// Starts the tasks about the Node object and the API server.
pub(crate) struct NodeTasks<'a> {
    pub(super) tasks: &'a ProcessTasks,
    pub(super) ctx: &'a Arc<WorkerContext>,
    pub(super) args: &'a Args,
    pub(super) paths: &'a Paths,
    pub(super) api: &'a ApiAccess,
}

impl NodeTasks<'_> {
    /// Starts the reports about the Node object and the watches of the API server. Without an API server,
    /// only the pod CIDR of the command line is set.
    pub(crate) fn start_reports(&self, conditions: &NodeConditions) {
        let (ctx, args) = (self.ctx, self.args);
        let stop = &self.tasks.stop;
        let (settings, runtime) = (&ctx.node.settings, &ctx.runtime);
        let Some(client) = &self.api.client else {
            if !args.pod_cidr.is_empty() {
                let set = pod_sync_node_object::set_pod_cidrs(
                    args.pod_cidr.clone(),
                    runtime.calls.clone(),
                    stop.clone(),
                );
                self.tasks.spawn("pod-cidr", set);
            }
            return;
        };
        let (images_tx, images) = watch::channel(None);
        let max_images = usize::try_from(args.resources.node_status_max_images).ok();
        let poll =
            pod_sync_node_object::poll_images(runtime.calls.clone(), max_images, images_tx, stop.clone());
        self.tasks.spawn("node-images", poll);
        let (ips_tx, ips) = watch::channel(None);
        let follow = pod_sync_node_object::follow_addresses(
            args.node_ip.clone(),
            settings.node_name.clone(),
            settings.node_ips.clone(),
            ips_tx,
            stop.clone(),
        );
        self.tasks.spawn("node-addresses", follow);
        let NodeConditions { shutting_down, pressure } = conditions.clone();
        let runtime_state = runtime.state.clone();
        let devices = ctx.environment.devices.capacity();
        let report = pod_sync_node_object::report_node(
            (**settings).clone(),
            args.labels(),
            NodeChannels { runtime: runtime_state, shutting_down, images, ips, pressure, devices },
            Arc::clone(&runtime.pleg),
            Arc::clone(&ctx.reporting.statuses),
            ctx.clock.clone(),
            stop.clone(),
        );
        let mut checked = self.api.name_checked.subscribe();
        self.tasks.spawn("node-facts", async move {
            // The sender is in use for as long as this process is.
            if checked.wait_for(|is_checked| *is_checked).await.is_ok() {
                report.await;
            }
        });
        self.start_watches(client);
    }

    /// Starts the tasks that renew the certificates of the node and follow its kubeconfig.
    pub(crate) fn start_certificates(&self) {
        let (ctx, stop) = (self.ctx, &self.tasks.stop);
        let certificates = &self.args.certificates;
        let (Some(client), Some(kubeconfig)) = (&self.api.node_client, &self.args.node.kubeconfig) else {
            return;
        };
        self.tasks.spawn("kubeconfig", client.clone().follow(stop.clone()));
        let node = &ctx.node.settings.node_name;
        if certificates.rotate_certificates || certificates.bootstrap_kubeconfig.is_some() {
            let manager = ClientCertificate::new(
                node,
                client.clone(),
                &certificates.cert_dir,
                kubeconfig,
                ctx.clock.clone(),
            );
            let manager = manager
                .with_bootstrap(certificates.bootstrap_kubeconfig.clone())
                .with_rotation(certificates.rotate_certificates);
            self.tasks.spawn("client-certificate", manager.run(stop.clone()));
        }
        if certificates.rotate_server_certificates {
            let manager = ServingCertificate::new(
                node,
                self.api.cluster.nodes(),
                client.client(),
                &certificates.cert_dir,
                ctx.clock.clone(),
            );
            let manager = manager.with_copy(&self.paths.run().join(SERVING_COPY));
            self.tasks.spawn("serving-certificate", manager.run(stop.clone()));
        }
    }

    /// Starts the check of the node name. The requests of this process wait for it, and it stops the process
    /// if the name is taken. Pods of manifests do not wait.
    pub(crate) fn start_name_check(&self) {
        let Some(client) = self.api.node_client.clone() else { return };
        let name = self.ctx.node.settings.node_name.clone();
        let offline = self.ctx.environment.offline.as_ref();
        let contact = offline.map(|cache| Arc::clone(cache.contact()));
        let check = NameCheck { client, name, clock: self.ctx.clock.clone(), contact };
        let (checked, stop_with) = (self.api.name_checked.clone(), self.tasks.stopper());
        let stop = self.tasks.stop.clone();
        self.tasks.spawn("node-name", async move {
            let taken = tokio::select! {
                // Nothing is lost: the check only reads.
                () = stop.cancelled() => return,
                taken = check.run() => taken,
            };
            match taken {
                None => {
                    checked.send_replace(true);
                }
                Some(taken) => stop_with(StartRefusal::NodeName(taken)),
            }
        });
    }

    fn start_watches(&self, client: &kube::Client) {
        let (cluster, stop) = (&self.api.cluster, &self.tasks.stop);
        let node_name = self.ctx.node.settings.node_name.clone();
        let node = Arc::clone(cluster).watch_node(client.clone(), node_name, stop.clone());
        self.tasks.spawn("watch-node", node);
        let services = Arc::clone(cluster).watch_services(client.clone(), stop.clone());
        self.tasks.spawn("watch-services", services);
        let runtime_classes = Arc::clone(cluster).watch_runtime_classes(client.clone(), stop.clone());
        self.tasks.spawn("watch-runtime-classes", runtime_classes);
        if let Some(offline) = self.ctx.environment.offline.clone() {
            self.tasks.spawn("offline-cache", offline.run(cluster.nodes(), stop.clone()));
        }
        if let Some(objects) = &self.api.object_cache {
            let idle = Arc::clone(objects).stop_idle_watches(stop.clone());
            self.tasks.spawn("idle-object-watches", idle);
        }
        let runtime = self.ctx.runtime.calls.clone();
        let cidrs = pod_sync_node_object::follow_pod_cidrs(cluster.nodes(), runtime, stop.clone());
        self.tasks.spawn("pod-cidrs", cidrs);
    }
}
