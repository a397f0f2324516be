//! The stages of the start of pod-sync: open the state, connect the clients, start the tasks, serve.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use pod_sync_clients::{EventType, Events, Pleg, ProbeFailure, Probes, Runtime, Statuses, WorkerWakeups};
use pod_sync_containment::Containment;
use pod_sync_cri_config::NodeSettings;
use pod_sync_csi::paths::Root;
use pod_sync_decisions::admission::PressureCondition;
use pod_sync_decisions::backoff::BackoffDelays;
use pod_sync_decisions::containment::ProcessExit;
use pod_sync_decisions::status::KillCause;
use pod_sync_images::credentials::Credentials;
use pod_sync_images::credentials::node_files::{ConfigDirs, NodeFiles};
use pod_sync_images::credentials::plugins::Plugins;
use pod_sync_images::pull_records::PullRecords;
use pod_sync_images::pulls::PullLimits;
use pod_sync_logs::LogDirs;
use pod_sync_metrics::PodMetrics;
use pod_sync_node::{NodeInputs, RuntimeState};
use pod_sync_objects::ObjectCache;
use pod_sync_sources::api::ClusterView;
use pod_sync_sources::cluster::{ApiSources, Objects, Tokens};
use pod_sync_sources::objects::ManifestObjects;
use pod_sync_sources::{SourceKind, SourceMessage};
use pod_sync_state::{Allocations, IdPool, PodRecord, StateDir, UserNamespaces};
use pod_sync_storage::{Measured, StorageSettings};
use pod_sync_views::PodViews;
use pod_sync_volume_tasks::objects::{ApiObjects, VolumeObjects};
use pod_sync_volume_tasks::{Inputs, VolumeTasks};
use pod_sync_volumes::Volumes;
use pod_sync_volumes::mount_table::ProcMountTable;
use pod_sync_volumes::token::TokenSource;
use quintlet_cgroups::Cgroups;
use quintlet_kit::clock::Clock;
use quintlet_kit::grant::GrantKey;
use quintlet_kit::paths::{CriSocket, Paths};
use quintlet_kit::server::{HealthHandle, SYNC_LOOP, Server};
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_kit::task::{TaskGroup, spawn};
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1::checkpoints_server::CheckpointsServer;
use quintlet_proto::podsync::v1::pod_sync_server::PodSyncServer;
use quintlet_proto::podsync::v1::storage_server::StorageServer;
use quintlet_proto::podsync::v1::volumes_server::VolumesServer;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::admission::{NodeAdmission, NodeConditions};
use crate::args::{Args, CgroupDriver};
use crate::eviction::{EvictionInputs, EvictionNode};
use crate::image_gc;
use crate::image_gc::ImageGcContext;
use crate::pod_manager::{self, PodManager};
use crate::serve::{ServeContext, Service};
use crate::settings::settings;
use crate::shutdown::ActivePods;
use crate::storage::{LoggedPods, MeasuredPods};
use crate::volumes::MountedVolumes;
use pod_sync_worker::PodWorkers;
use pod_sync_worker::StaticPodGate;
use pod_sync_worker::context::{
    Checkpoints, FaultIsolation, ImagePulls, NodeConfig, PodEnvironment, Reporting, RuntimeAccess,
    WorkerContext, WorkerControl,
};

const CGROUP_FS: &str = "/sys/fs/cgroup";

/// Read timeout of the connection to the API server. It is longer than any watch without events.
const SILENCE: Duration = Duration::from_secs(300);

/// pod-sync with its state open, before and while its tasks run.
pub(crate) struct Agent {
    pub(crate) tasks: TaskGroup,
    args: Args,
    paths: Paths,
    ctx: Arc<WorkerContext>,
    /// Client of the API server; none without a kubeconfig.
    api: Option<kube::Client>,
    cluster: Arc<ClusterView>,
    /// ConfigMaps and Secrets of the API server; none without one.
    objects: Option<Arc<ObjectCache>>,
    manifests: Arc<ManifestObjects>,
    measured: Arc<Measured>,
    image_gc: ImageGcContext,
    stop: CancellationToken,
}

/// The ends of channels that the tasks of the clients own.
pub(crate) struct ClientInputs {
    runtime_state: watch::Sender<RuntimeState>,
    probe_failures: mpsc::Receiver<ProbeFailure>,
}

impl Agent {
    /// Opens the state and makes the clients. Only the volume tasks run already.
    pub(crate) async fn open(
        args: Args,
        clock: Clock,
        epoch: u64,
        stop: CancellationToken,
    ) -> anyhow::Result<(Self, ClientInputs)> {
        let paths = args.common.paths();
        let settings = settings(&args)?;
        create_directories(&args)?;
        let node = Arc::new(node_config(&args, &paths, settings, epoch)?);
        let checkpoints = Arc::new(Checkpoints {
            records: StateDir::open(&paths.state_dir(), quintlet_kit::boot::boot_id())?,
            allocations: Allocations::open(&args.root_dir),
        });
        let containment = Containment::open(&paths, quintlet_kit::boot::boot_id(), clock.clone())
            .context("failed to open the containment records")?;
        let api = api_client(&args).await?;
        let wakeups = Arc::new(WorkerWakeups::default());
        let (runtime, runtime_state) = runtime_access(&args, &paths, epoch, &clock, &wakeups);
        let (probes, probe_failures) = Probes::new(paths.probe_dir(), Arc::clone(&wakeups));
        let reporting = Arc::new(Reporting {
            statuses: Arc::new(Statuses::new(paths.status(), Arc::clone(&wakeups))),
            events: Events::new(paths.status(), clock.clone(), stop.clone()),
            views: PodViews::default(),
            metrics: PodMetrics::default(),
        });
        let manifests = Arc::new(ManifestObjects::default());
        let cluster = Arc::new(ClusterView::default());
        let detection = (args.config_map_and_secret_change_detection_strategy, args.sync_frequency);
        let from_api = |client| ApiSources::new(client, &cluster, detection, &wakeups, &stop);
        let from_api = api.clone().map(from_api);
        let cache = from_api.as_ref().map(|api| Arc::clone(&api.cache));
        let objects = Objects::new(Arc::clone(&manifests), from_api);
        let tokens = api.clone().map(|client| Arc::new(Tokens(client)) as Arc<dyn TokenSource>);
        let volume_tasks = Inputs {
            root_dir: args.root_dir.clone(),
            node: node.settings.node_name.clone(),
            objects: api.clone().map(|client| Arc::new(ApiObjects(client)) as Arc<dyn VolumeObjects>),
            tokens: tokens.clone(),
            status_reporter: paths.status(),
            nodes: cluster.nodes(),
            events: reporting.events.clone(),
            clock: clock.clone(),
        };
        let volume_tasks = VolumeTasks::start(volume_tasks, stop.clone());
        let volume_tasks = volume_tasks.await.context("failed to read the volumes of pods")?;
        let environment = Arc::new(PodEnvironment {
            cgroups: cgroups(&args, &node.settings),
            volumes: Volumes::new(args.root_dir.clone()),
            volume_tasks,
            objects: Arc::new(objects),
            tokens,
            user_namespaces: UserNamespaces::new(
                &args.root_dir,
                IdPool::of_host(node.settings.max_pods, args.resources.ids_per_pod)?,
            ),
        });
        let control = Arc::new(WorkerControl {
            pod_workers: PodWorkers::new(args.sync_frequency, clock.clone(), Arc::clone(&wakeups)),
            wakeups: Arc::clone(&wakeups),
            static_pod_gate: StaticPodGate::default(),
        });
        let ctx = Arc::new(WorkerContext {
            node,
            runtime,
            checkpoints,
            environment,
            images: Arc::new(image_pulls(&args, &clock)?),
            probes,
            control,
            faults: Arc::new(FaultIsolation::new(containment, Arc::clone(&reporting), wakeups)),
            reporting,
            clock,
        });
        let (tasks, measured) = (TaskGroup::new(), Arc::default());
        let image_gc = ImageGcContext::new(&ctx, args.images.policy());
        let agent = Self {
            tasks,
            args,
            paths,
            ctx,
            api,
            cluster,
            objects: cache,
            manifests,
            measured,
            image_gc,
            stop,
        };
        Ok((agent, ClientInputs { runtime_state, probe_failures }))
    }

    /// Starts the clients of the other services and of the runtime.
    pub(crate) fn start_clients(&self, inputs: ClientInputs) {
        let (ctx, stop) = (&self.ctx, &self.stop);
        let node_name = ctx.node.settings.node_name.clone();
        ctx.reporting.events.node(&node_name, EventType::Normal, "Starting", "Starting kubelet.");
        let limits = pod_sync_node::pod_limits(&ctx.node.settings);
        self.tasks.spawn(
            "runtime-poll",
            pod_sync_node::poll_runtime(
                ctx.runtime.calls.clone(),
                ctx.clock.clone(),
                inputs.runtime_state,
                (ctx.environment.cgroups.clone(), limits),
                (ctx.reporting.events.clone(), node_name),
                stop.clone(),
            ),
        );
        let exit_note = self.paths.exit(pod_sync_containment::CRI_PROXY);
        let (faults, control) = (Arc::clone(&ctx.faults), Arc::clone(&ctx.control));
        let record_crash = move |cause: &ProcessExit, pods: &BTreeSet<PodUid>| {
            faults.containment.record_crash(pod_sync_containment::CRI_PROXY, cause, pods);
            pods.iter().for_each(|uid| control.wakeups.wake(uid));
        };
        let crashes = pod_sync_containment::follow_cri_proxy(
            ctx.runtime.calls.broken(),
            exit_note,
            ctx.clock.clone(),
            record_crash,
            stop.clone(),
        );
        self.tasks.spawn("cri-proxy-crashes", crashes);
        self.tasks.spawn("pleg-follow", Arc::clone(&ctx.runtime.pleg).follow(stop.clone()));
        self.tasks.spawn("probes", Arc::clone(&ctx.probes).run(stop.clone()));
        self.tasks.spawn("statuses", Arc::clone(&ctx.reporting.statuses).run(stop.clone()));
        let failures = report_probe_failures(Arc::clone(&ctx.reporting), inputs.probe_failures, stop.clone());
        self.tasks.spawn("probe-failures", failures);
    }

    /// Starts the graceful node shutdown. Returns whether the node is shutting down.
    pub(crate) fn start_shutdown(&self) -> anyhow::Result<watch::Receiver<bool>> {
        let ctx = &self.ctx;
        let (shutting_down_tx, shutting_down) = watch::channel(false);
        let active = ActivePods { reporting: Arc::clone(&ctx.reporting), control: Arc::clone(&ctx.control) };
        let node = pod_sync_shutdown::Node {
            name: ctx.node.settings.node_name.clone(),
            root_dir: ctx.node.settings.root_dir.clone(),
            events: ctx.reporting.events.clone(),
            metrics: ctx.reporting.metrics.clone(),
            clock: ctx.clock.clone(),
        };
        let (plan, login) = (self.args.shutdown.plan()?, Box::new(self.args.shutdown.login()));
        let shutdown = pod_sync_shutdown::run(active, node, plan, login, shutting_down_tx, self.stop.clone());
        self.tasks.spawn("shutdown", shutdown);
        Ok(shutting_down)
    }

    /// Starts image garbage collection, the measurement of volumes and the rotation of logs.
    pub(crate) fn start_maintenance(&self) {
        let (ctx, stop) = (&self.ctx, &self.stop);
        let images = self.image_gc.clone();
        self.tasks.spawn("pull-intents", image_gc::recover_pulls(images.clone(), stop.clone()));
        self.tasks.spawn("image-gc", image_gc::run(images, stop.clone()));
        let root_dir = &ctx.node.settings.root_dir;
        let measured_pods = Arc::new(MeasuredPods {
            reporting: Arc::clone(&ctx.reporting),
            control: Arc::clone(&ctx.control),
            faults: Arc::clone(&ctx.faults),
        });
        let count =
            pod_sync_storage::count_volumes(Arc::clone(&measured_pods), root_dir.clone(), stop.clone());
        self.tasks.spawn("volume-counts", count);
        let storage = StorageSettings {
            root_dir: root_dir.clone(),
            period: self.args.resources.volume_stats_agg_period,
            clock: ctx.clock.clone(),
            metrics: ctx.reporting.metrics.clone(),
        };
        let mounted = Arc::new(MountedVolumes {
            tasks: ctx.environment.volume_tasks.clone(),
            root: Root::new(root_dir),
        });
        let (pods, measured) = (Arc::clone(&measured_pods), Arc::clone(&self.measured));
        let usage = pod_sync_storage::run_provided(pods, mounted, measured, storage.clone(), stop.clone());
        self.tasks.spawn("volume-usages", usage);
        let measure = pod_sync_storage::run(measured_pods, Arc::clone(&self.measured), storage, stop.clone());
        self.tasks.spawn("storage", measure);
        let logged_pods = Arc::new(LoggedPods {
            node: Arc::clone(&ctx.node),
            pleg: Arc::clone(&ctx.runtime.pleg),
            faults: Arc::clone(&ctx.faults),
        });
        let dirs = LogDirs {
            pods: ctx.node.settings.pod_logs_dir.clone(),
            containers: ctx.node.container_logs_dir.clone(),
        };
        let (runtime, clock) = (ctx.runtime.calls.clone(), ctx.clock.clone());
        let logs =
            pod_sync_logs::run(logged_pods, runtime, clock, dirs, self.args.container_logs(), stop.clone());
        self.tasks.spawn("container-logs", logs);
    }

    /// Returns the loop of evictions, which starts after the pods of `records` are restored. It sends the pressure conditions that are
    /// true. Returns `None` if nothing is ever evicted.
    pub(crate) fn evictions(
        &self,
        records: &[(PodUid, PodRecord)],
        conditions: watch::Sender<BTreeSet<PressureCondition>>,
    ) -> anyhow::Result<Option<impl Future<Output = ()> + Send + use<>>> {
        let ctx = &self.ctx;
        let Some(settings) = self.args.eviction.settings(self.args.resources.enforces_pods())? else {
            return Ok(None);
        };
        let is_evicted = |record: &PodRecord| {
            let killed_as =
                record.termination.as_ref().and_then(|termination| termination.killed_as.as_ref());
            killed_as.is_some_and(|killed| killed.cause == KillCause::Evicted)
        };
        let evicted = records.iter().filter(|(_, record)| is_evicted(record)).map(|(uid, _)| uid.clone());
        let node = EvictionNode::new(EvictionInputs {
            clock: ctx.clock.clone(),
            node: Arc::clone(&ctx.node),
            runtime: ctx.runtime.clone(),
            reporting: Arc::clone(&ctx.reporting),
            control: Arc::clone(&ctx.control),
            images: self.image_gc.clone(),
            measured: Arc::clone(&self.measured),
            paths: pod_sync_evictor::measure::Paths {
                root_dir: ctx.node.settings.root_dir.clone(),
                pod_logs_dir: ctx.node.settings.pod_logs_dir.clone(),
                cgroups: PathBuf::from(CGROUP_FS),
                cgroup_root: self.args.cgroup_root.clone(),
                proc: PathBuf::from("/proc"),
            },
            evicted: evicted.collect(),
        });
        Ok(Some(pod_sync_evictor::run(node, settings, conditions, self.stop.clone())))
    }

    /// Starts the reports about the Node object and the watches of the API server. Without an API server, only the pod CIDR of
    /// the command line is set.
    pub(crate) fn start_node(&self, conditions: &NodeConditions) {
        let (ctx, args, stop) = (&self.ctx, &self.args, &self.stop);
        let (settings, runtime) = (&ctx.node.settings, &ctx.runtime);
        let Some(client) = &self.api else {
            if !args.pod_cidr.is_empty() {
                let set =
                    pod_sync_node::set_pod_cidrs(args.pod_cidr.clone(), runtime.calls.clone(), stop.clone());
                self.tasks.spawn("pod-cidr", set);
            }
            return;
        };
        let (images_tx, images) = watch::channel(None);
        let max_images = usize::try_from(args.resources.node_status_max_images).ok();
        let poll = pod_sync_node::poll_images(runtime.calls.clone(), max_images, images_tx, stop.clone());
        self.tasks.spawn("node-images", poll);
        let (ips_tx, ips) = watch::channel(None);
        let follow = pod_sync_node::follow_addresses(
            args.node_ip.clone(),
            settings.node_name.clone(),
            settings.node_ips.clone(),
            ips_tx,
            stop.clone(),
        );
        self.tasks.spawn("node-addresses", follow);
        let NodeConditions { shutting_down, pressure } = conditions.clone();
        let runtime_state = runtime.state.clone();
        let report = pod_sync_node::report_node(
            (**settings).clone(),
            args.labels(),
            NodeInputs { runtime: runtime_state, shutting_down, images, ips, pressure },
            Arc::clone(&runtime.pleg),
            Arc::clone(&ctx.reporting.statuses),
            ctx.clock.clone(),
            stop.clone(),
        );
        self.tasks.spawn("node-facts", report);
        self.start_watches(client);
    }

    fn start_watches(&self, client: &kube::Client) {
        let (cluster, stop) = (&self.cluster, &self.stop);
        let node_name = self.ctx.node.settings.node_name.clone();
        let node = Arc::clone(cluster).watch_node(client.clone(), node_name, stop.clone());
        self.tasks.spawn("watch-node", node);
        let services = Arc::clone(cluster).watch_services(client.clone(), stop.clone());
        self.tasks.spawn("watch-services", services);
        let runtime_classes = Arc::clone(cluster).watch_runtime_classes(client.clone(), stop.clone());
        self.tasks.spawn("watch-runtime-classes", runtime_classes);
        if let Some(objects) = &self.objects {
            let idle = Arc::clone(objects).stop_idle_watches(stop.clone());
            self.tasks.spawn("idle-object-watches", idle);
        }
        let runtime = self.ctx.runtime.calls.clone();
        let cidrs = pod_sync_node::follow_pod_cidrs(cluster.nodes(), runtime, stop.clone());
        self.tasks.spawn("pod-cidrs", cidrs);
    }

    /// Loads the records of an earlier run. Readers of the views wait for the pods in them.
    pub(crate) fn load_records(&self) -> Vec<(PodUid, PodRecord)> {
        let records = self.ctx.checkpoints.records.load();
        let with_pod = records.iter().filter(|(_, record)| pod_manager::has_pod(record));
        self.ctx.reporting.views.expect(with_pod.map(|(uid, _)| uid.clone()));
        records
    }

    /// Starts the server of podsync.v1. Returns its task and the handle of its health service.
    pub(crate) async fn serve(
        &self,
    ) -> anyhow::Result<(JoinHandle<Result<(), tonic::transport::Error>>, HealthHandle)> {
        let ctx = &self.ctx;
        let path = self.paths.podsync();
        let listener = bind_unix(&path, 0o660).with_context(|| format!("{}", path.display()))?;
        let peers = PeerPolicy::root_and_self().and(&self.args.allow_uid);
        let service = Service::new(ServeContext {
            clock: ctx.clock.clone(),
            node: Arc::clone(&ctx.node),
            runtime: ctx.runtime.clone(),
            reporting: Arc::clone(&ctx.reporting),
            control: Arc::clone(&ctx.control),
            faults: Arc::clone(&ctx.faults),
            measured: Arc::clone(&self.measured),
            volume_tasks: ctx.environment.volume_tasks.clone(),
        });
        let server = Server::new("pod-sync")
            .observers(&self.args.common.observer_uid)
            .add_service(PodSyncServer::new(service.clone()))
            .add_service(CheckpointsServer::new(service.clone()))
            .add_service(StorageServer::new(service.clone()))
            .add_service(VolumesServer::new(service));
        let health = server.health();
        health.set_serving(SYNC_LOOP).await;
        Ok((spawn("server", server.serve(listener, peers, self.stop.clone())), health))
    }

    /// Serves metrics over HTTP if the command line asks for it.
    pub(crate) fn serve_metrics(&self) {
        let Some(address) = self.args.common.metrics_listen else { return };
        let serve = quintlet_kit::server::serve_metrics(address, self.stop.clone());
        self.tasks.spawn("metrics", async move {
            if let Err(error) = serve.await {
                tracing::error!(%error, %address, "failed to serve metrics");
            }
        });
    }

    /// Starts the sources. Returns the pod manager and the queue that it reads.
    pub(crate) fn pod_manager(
        &self,
        conditions: NodeConditions,
    ) -> (PodManager, mpsc::Receiver<SourceMessage>) {
        let (sources, kinds) = self.start_sources();
        let admission = Arc::new(NodeAdmission::new(
            (*self.ctx.node.settings).clone(),
            &self.args.labels(),
            Arc::clone(&self.cluster),
            self.api.clone(),
            self.ctx.runtime.state.clone(),
            conditions,
        ));
        let manager = PodManager::new(Arc::clone(&self.ctx), Arc::clone(&self.manifests), admission, &kinds);
        (manager, sources)
    }

    fn start_sources(&self) -> (mpsc::Receiver<SourceMessage>, Vec<SourceKind>) {
        let (args, stop) = (&self.args, &self.stop);
        let node = &self.ctx.node.settings.node_name;
        let (tx, rx) = mpsc::channel(pod_sync_sources::SOURCE_QUEUE);
        let mut kinds = Vec::new();
        if let Some(path) = &args.manifests {
            kinds.push(SourceKind::File);
            let run = pod_sync_sources::file::run(
                path.clone(),
                node.clone(),
                args.file_check_frequency,
                tx.clone(),
                stop.clone(),
            );
            self.tasks.spawn("source-file", run);
        }
        if let Some(url) = &args.manifest_url {
            kinds.push(SourceKind::Http);
            let run = pod_sync_sources::http::run(
                url.clone(),
                args.manifest_url_header.clone(),
                node.clone(),
                args.http_check_frequency,
                pod_sync_sources::http::system_tls(),
                tx.clone(),
                stop.clone(),
            );
            self.tasks.spawn("source-http", run);
        }
        if let Some(client) = self.api.clone() {
            kinds.push(SourceKind::Api);
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

fn create_directories(args: &Args) -> anyhow::Result<()> {
    let root_dir = &args.root_dir;
    pod_sync_volumes::layout::prepare_root(root_dir).with_context(|| format!("{}", root_dir.display()))?;
    match pod_sync_volumes::layout::share_root(root_dir, &ProcMountTable) {
        Ok(false) => {}
        Ok(true) => tracing::info!(dir = %root_dir.display(), "made the root directory a shared mount"),
        // Only volumes with bidirectional mount propagation need it.
        Err(error) => {
            tracing::warn!(dir = %root_dir.display(), %error, "failed to make the root directory a shared mount")
        }
    }
    for dir in container_logs_dir(args).iter().chain([&args.pod_logs_dir]) {
        std::fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
    }
    Ok(())
}

fn container_logs_dir(args: &Args) -> Option<PathBuf> {
    Some(&args.container_logs_dir).filter(|dir| !dir.is_empty()).map(PathBuf::from)
}

fn node_config(args: &Args, paths: &Paths, settings: NodeSettings, epoch: u64) -> anyhow::Result<NodeConfig> {
    Ok(NodeConfig {
        settings: Arc::new(settings),
        has_api: args.node.kubeconfig.is_some(),
        epoch,
        sync_frequency: args.sync_frequency,
        container_logs_dir: container_logs_dir(args),
        dead_containers: args.resources.dead_containers(),
        crash_loop: BackoffDelays {
            max: args.resources.max_container_restart_period,
            ..BackoffDelays::default()
        },
        grant_key: GrantKey::load_or_create(&paths.grant_key())
            .context("failed to load the key of exec grants")?,
    })
}

fn runtime_access(
    args: &Args,
    paths: &Paths,
    epoch: u64,
    clock: &Clock,
    wakeups: &Arc<WorkerWakeups>,
) -> (RuntimeAccess, watch::Sender<RuntimeState>) {
    let timeout = args.resources.runtime_request_timeout;
    let (state_tx, state) = watch::channel(RuntimeState {
        not_ready: Some("container runtime status check may not have completed yet".to_owned()),
        ..RuntimeState::default()
    });
    let access = RuntimeAccess {
        calls: Runtime::new(paths.cri(CriSocket::Sync), epoch, clock.clone(), timeout),
        pleg: Arc::new(Pleg::new(paths.pleg(), Arc::clone(wakeups))),
        state,
    };
    (access, state_tx)
}

fn cgroups(args: &Args, settings: &NodeSettings) -> Cgroups {
    let root = Path::new(CGROUP_FS);
    let cgroups = Cgroups::new(root, &args.cgroup_root, settings.cgroup)
        .with_cgroups_per_qos(args.resources.cgroups_per_qos)
        .with_owner(&format!("{} {}", settings.node_name, args.root_dir.display()))
        .with_system_bus(args.shutdown.system_bus.clone());
    pod_sync_metrics::set_cgroup_version(quintlet_cgroups::is_v2(root));
    if args.cgroup_driver == CgroupDriver::Systemd {
        cgroups.set_driver(quintlet_cgroups::CgroupDriver::Systemd);
    }
    cgroups
}

fn image_pulls(args: &Args, clock: &Clock) -> anyhow::Result<ImagePulls> {
    Ok(ImagePulls {
        pull_records: PullRecords::open(&args.root_dir, args.pulls.verification()?, clock.clone())
            .context("failed to open the records of image pulls")?,
        pulls: PullLimits::new(args.pulls.settings())?,
        credentials: credentials(args, clock)?,
    })
}

fn credentials(args: &Args, clock: &Clock) -> anyhow::Result<Credentials> {
    let plugins = match (&args.pulls.provider_config, &args.pulls.provider_bin_dir) {
        (Some(config), Some(bin_dir)) => Some(Plugins::load(config, bin_dir, clock.clone())?),
        // The command line requires both or neither.
        (None, _) | (_, None) => None,
    };
    Ok(Credentials::new(NodeFiles::new(&ConfigDirs::of_this_process(&args.root_dir)), plugins))
}

async fn api_client(args: &Args) -> anyhow::Result<Option<kube::Client>> {
    let Some(path) = &args.node.kubeconfig else { return Ok(None) };
    let kubeconfig =
        kube::config::Kubeconfig::read_from(path).with_context(|| format!("{}", path.display()))?;
    let options = kube::config::KubeConfigOptions::default();
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    Ok(Some(kube::Client::try_from(config)?))
}

async fn report_probe_failures(
    reporting: Arc<Reporting>,
    mut failures: mpsc::Receiver<ProbeFailure>,
    stop: CancellationToken,
) {
    loop {
        // Failures in the queue are lost at the end, as events in flight are.
        let failure = tokio::select! {
            () = stop.cancelled() => return,
            failure = failures.recv() => failure,
        };
        let Some(failure) = failure else { return };
        let Some(view) = reporting.views.get(&failure.uid) else { continue };
        let is_init =
            quintlet_model::pod::init_containers(&view.pod).iter().any(|c| c.name == failure.container);
        let list = if is_init { "initContainers" } else { "containers" };
        let path = format!("spec.{list}{{{}}}", failure.container);
        reporting.events.pod(&view.pod, EventType::Warning, &failure.reason, &failure.message, &path);
    }
}
