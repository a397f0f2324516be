//! pod-sync: desired pods, one worker per pod, pod status.
//!
//! Tasks: a source each (`source`), the sync loop ([`pod_manager`]), a worker per pod ([`worker`]), a follower of pleg-service, a
//! driver per instance of probe-service, the streams to status-reporter ([`pod_sync_clients`]), the runtime poll and the node facts
//! ([`pod_sync_node`]), and the server of podsync.v1 ([`serve`]). Workers are woken by bells, never fed by queues; what they
//! decide is in [`pod_sync_decisions`], which does no I/O.
//!
//! Life cycle: take the root directory ([`pod_sync_state`]), put back the records of an earlier run ([`pod_sync_state`]), follow the other
//! services, then the sources. SIGTERM leaves every pod running. SIGUSR1 removes the pods of manifests, then ends.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod admission;
pub mod args;
pub mod checkpoint;
pub mod context;
pub mod housekeeping;
pub mod image;
pub mod image_gc;
pub mod mirror;
mod pending_resizes;
pub mod pod_manager;
pub mod pod_workers;
mod process;
pub mod serve;
mod settings;
mod shutdown;
pub mod static_pod_gate;
mod storage;
pub mod view;
pub mod worker;

pub use crate::process::main;

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::Context as _;
use pod_sync_clients::{EventType, Events, Pleg, Probes, Runtime, Statuses, WorkerWakeups};
use pod_sync_decisions::backoff::BackoffDelays;
use pod_sync_decisions::containment::ProcessExit;
use pod_sync_images::credentials::Credentials;
use pod_sync_images::credentials::node_files::{ConfigDirs, NodeFiles};
use pod_sync_images::credentials::plugins::Plugins;
use pod_sync_images::pull_records::PullRecords;
use pod_sync_images::pulls::PullLimits;
use pod_sync_logs::LogDirs;
use pod_sync_sources::SourceKind;
use pod_sync_sources::api::ClusterView;
use pod_sync_sources::objects::ManifestObjects;
use pod_sync_storage::StorageSettings;
use pod_sync_volumes::mount_table::ProcMountTable;
use quintlet_kit::clock::Clock;
use quintlet_kit::grant::GrantKey;
use quintlet_kit::paths::CriSocket;
use quintlet_kit::server::{SYNC_LOOP, Server};
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_kit::task::{TaskGroup, spawn};
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1::checkpoints_server::CheckpointsServer;
use quintlet_proto::podsync::v1::pod_sync_server::PodSyncServer;
use quintlet_proto::podsync::v1::storage_server::StorageServer;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::context::{Context, Views};
use crate::pod_manager::PodManager;
use crate::settings::settings;
use crate::static_pod_gate::StaticPodGate;
use pod_sync_containment::Containment;
use pod_sync_node::RuntimeState;
use pod_sync_state::StateDir;
use pod_sync_state::{IdPool, UserNamespaces};

/// How long tasks get to end.
const GRACE: std::time::Duration = std::time::Duration::from_secs(3);

/// Runs until `stop`, or until `drain` was true and no pod is left.
///
/// # Errors
/// The root directory is another's, or a directory or socket cannot be made. A missing runtime, peer or API server is no
/// error.
pub async fn run(args: Args, drain: watch::Receiver<bool>, stop: CancellationToken) -> anyhow::Result<()> {
    let clock = Clock::system();
    let paths = args.common.paths();
    let owner = pod_sync_state::Owner::take(&args.root_dir, &clock)?;
    let settings = settings(&args)?;
    pod_sync_volumes::layout::prepare_root(&args.root_dir)
        .with_context(|| format!("{}", args.root_dir.display()))?;
    match pod_sync_volumes::layout::share_root(&args.root_dir, &ProcMountTable) {
        Ok(false) => {}
        Ok(true) => {
            tracing::info!(dir = %args.root_dir.display(), "the root directory is a shared mount now")
        }
        // Only mounts that are to be seen on the node too need it.
        Err(e) => {
            tracing::warn!(dir = %args.root_dir.display(), error = %e, "the root directory is no shared mount")
        }
    }
    let grant_key = GrantKey::load_or_create(&paths.grant_key()).context("key of exec grants")?;
    let state = StateDir::open(&paths.state_dir(), quintlet_kit::boot::boot_id())?;
    let containment = Containment::open(&paths, quintlet_kit::boot::boot_id(), clock.clone())
        .context("record of the pods in work")?;
    let client = client(&args).await?;
    let tasks = TaskGroup::new();
    let wakes = Arc::new(WorkerWakeups::default());

    let limit = args.resources.runtime_request_timeout;
    let runtime = Runtime::new(paths.cri(CriSocket::Sync), owner.epoch(), clock.clone(), limit);
    let pleg = Arc::new(Pleg::new(paths.pleg(), Arc::clone(&wakes)));
    let (probes, unhealthy) = Probes::new(paths.probe_dir(), Arc::clone(&wakes));
    let statuses = Arc::new(Statuses::new(paths.status(), Arc::clone(&wakes)));
    let (runtime_tx, runtime_state) = watch::channel(RuntimeState {
        not_ready: Some("container runtime status check may not have completed yet".to_owned()),
        ..RuntimeState::default()
    });
    let manifests = Arc::new(ManifestObjects::default());
    let view = Arc::new(ClusterView::default());
    let objects = Arc::new(pod_sync_sources::cluster::Objects::new(
        Arc::clone(&manifests),
        client.clone(),
        Arc::clone(&view),
    ));
    let cgroups = pod_sync_cgroups::Cgroups::new(
        std::path::Path::new("/sys/fs/cgroup"),
        &args.cgroup_root,
        settings.cgroup,
    )
    .with_cgroups_per_qos(args.resources.cgroups_per_qos)
    .with_owner(&format!("{} {}", settings.node_name, args.root_dir.display()));
    pod_sync_metrics::set_cgroup_version(pod_sync_cgroups::is_v2(std::path::Path::new("/sys/fs/cgroup")));
    let limits = pod_sync_node::pod_limits(&settings);
    if args.cgroup_driver == args::CgroupDriver::Systemd {
        cgroups.set_driver(pod_sync_cgroups::CgroupDriver::Systemd);
    }
    let node_groups = (cgroups.clone(), limits);
    let container_logs_dir =
        Some(args.container_logs_dir.clone()).filter(|d| !d.is_empty()).map(std::path::PathBuf::from);
    for dir in container_logs_dir.iter().chain([&args.pod_logs_dir]) {
        std::fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
    }
    let ctx = Arc::new(Context {
        volumes: pod_sync_volumes::Volumes::new(args.root_dir.clone()),
        tokens: client.clone().map(|c| {
            Arc::new(pod_sync_sources::cluster::Tokens(c)) as Arc<dyn pod_sync_volumes::token::TokenSource>
        }),
        node: Arc::new(settings.clone()),
        allocations: pod_sync_state::Allocations::open(&args.root_dir),
        cgroups,
        clock: clock.clone(),
        epoch: owner.epoch(),
        grant_key,
        state: state.clone(),
        containment,
        wakes: Arc::clone(&wakes),
        runtime: runtime.clone(),
        pleg: Arc::clone(&pleg),
        probes: Arc::clone(&probes),
        statuses: Arc::clone(&statuses),
        events: Events::new(paths.status(), clock.clone(), stop.clone()),
        objects,
        runtime_state: runtime_state.clone(),
        has_api: client.is_some(),
        sync_frequency: args.sync_frequency,
        pod_workers: pod_workers::PodWorkers::new(args.sync_frequency, clock.clone(), Arc::clone(&wakes)),
        views: Views::default(),
        pull_records: PullRecords::open(&args.root_dir, args.pulls.verification()?, clock.clone())
            .context("records of image pulls")?,
        pulls: PullLimits::new(args.pulls.settings())?,
        credentials: credentials(&args, &clock)?,
        user_namespaces: UserNamespaces::new(
            &args.root_dir,
            IdPool::of_host(settings.max_pods, args.resources.ids_per_pod)?,
        ),
        metrics: pod_sync_metrics::PodMetrics::default(),
        measured: Arc::default(),
        dead: args.resources.dead_containers(),
        crash_loop: BackoffDelays {
            max: args.resources.max_container_restart_period,
            ..BackoffDelays::default()
        },
        static_pod_gate: StaticPodGate::default(),
        container_logs_dir,
    });

    ctx.events.node(&ctx.node.node_name, EventType::Normal, "Starting", "Starting kubelet.");
    tasks.spawn(
        "runtime-poll",
        pod_sync_node::poll_runtime(
            runtime,
            clock.clone(),
            runtime_tx,
            node_groups,
            (ctx.events.clone(), ctx.node.node_name.clone()),
            stop.clone(),
        ),
    );
    let (broken, exit_note) = (ctx.runtime.broken(), paths.exit(pod_sync_containment::CRI_PROXY));
    let blamer = Arc::clone(&ctx);
    let blame = move |cause: &ProcessExit, pods: &BTreeSet<PodUid>| {
        blamer.containment.record_crash(pod_sync_containment::CRI_PROXY, cause, pods);
        pods.iter().for_each(|uid| blamer.wakes.wake(uid));
    };
    let deaths =
        pod_sync_containment::follow_cri_proxy(broken, exit_note, ctx.clock.clone(), blame, stop.clone());
    tasks.spawn("cri-proxy-deaths", deaths);
    tasks.spawn("pleg-follow", Arc::clone(&pleg).follow(stop.clone()));
    tasks.spawn("probes", Arc::clone(&probes).run(stop.clone()));
    tasks.spawn("statuses", Arc::clone(&statuses).run(stop.clone()));
    let (shutting_down_tx, shutting_down) = watch::channel(false);
    let login = Box::new(args.shutdown.login());
    let active = shutdown::ActivePods(Arc::clone(&ctx));
    let node = pod_sync_shutdown::Node {
        name: ctx.node.node_name.clone(),
        root_dir: ctx.node.root_dir.clone(),
        events: ctx.events.clone(),
        metrics: ctx.metrics.clone(),
        clock: ctx.clock.clone(),
    };
    let waits =
        pod_sync_shutdown::run(active, node, args.shutdown.plan()?, login, shutting_down_tx, stop.clone());
    tasks.spawn("shutdown", waits);
    tasks.spawn("pull-intents", image_gc::recover_pulls(Arc::clone(&ctx), stop.clone()));
    tasks.spawn("image-gc", image_gc::run(Arc::clone(&ctx), args.images.policy(), stop.clone()));
    tasks.spawn(
        "volume-counts",
        pod_sync_storage::count_volumes(Arc::clone(&ctx), ctx.node.root_dir.clone(), stop.clone()),
    );
    let storage = StorageSettings {
        root_dir: ctx.node.root_dir.clone(),
        period: args.resources.volume_stats_agg_period,
        clock: ctx.clock.clone(),
        metrics: ctx.metrics.clone(),
    };
    let measure = pod_sync_storage::run(Arc::clone(&ctx), Arc::clone(&ctx.measured), storage, stop.clone());
    tasks.spawn("storage", measure);
    tasks.spawn("unhealthy", unhealthy_events(Arc::clone(&ctx), unhealthy, stop.clone()));
    if let Some(client) = &client {
        let (images_tx, images) = watch::channel(None);
        let most = usize::try_from(args.resources.node_status_max_images).ok();
        tasks.spawn(
            "node-images",
            pod_sync_node::poll_images(ctx.runtime.clone(), most, images_tx, stop.clone()),
        );
        let (ips_tx, ips) = watch::channel(None);
        let name = settings.node_name.clone();
        let follow = pod_sync_node::follow_addresses(
            args.node_ip.clone(),
            name,
            settings.node_ips.clone(),
            ips_tx,
            stop.clone(),
        );
        tasks.spawn("node-addresses", follow);
        let facts = pod_sync_node::report_node(
            settings.clone(),
            args.labels(),
            pod_sync_node::NodeInputs {
                runtime: runtime_state.clone(),
                shutting_down: shutting_down.clone(),
                images,
                ips,
            },
            pleg,
            statuses,
            clock,
            stop.clone(),
        );
        tasks.spawn("node-facts", facts);
        tasks.spawn(
            "watch-node",
            Arc::clone(&view).watch_node(client.clone(), settings.node_name.clone(), stop.clone()),
        );
        tasks.spawn("watch-services", Arc::clone(&view).watch_services(client.clone(), stop.clone()));
        let watch = Arc::clone(&view).watch_runtime_classes(client.clone(), stop.clone());
        tasks.spawn("watch-runtime-classes", watch);
        let cidrs = pod_sync_node::follow_pod_cidrs(view.nodes(), ctx.runtime.clone(), stop.clone());
        tasks.spawn("pod-cidrs", cidrs);
    } else if !args.pod_cidr.is_empty() {
        let told = pod_sync_node::set_pod_cidrs(args.pod_cidr.clone(), ctx.runtime.clone(), stop.clone());
        tasks.spawn("pod-cidr", told);
    }

    let known = state.load();
    ctx.views
        .expect(known.iter().filter(|(_, record)| pod_manager::has_pod(record)).map(|(uid, _)| uid.clone()));
    let listener =
        bind_unix(&paths.podsync(), 0o660).with_context(|| format!("{}", paths.podsync().display()))?;
    let peers = PeerPolicy::root_and_self().and(&args.allow_uid);
    let service = serve::Service::new(Arc::clone(&ctx));
    let server = Server::new("pod-sync")
        .observers(&args.common.observer_uid)
        .add_service(PodSyncServer::new(service.clone()))
        .add_service(CheckpointsServer::new(service.clone()))
        .add_service(StorageServer::new(service));
    let health = server.health();
    health.set_serving(SYNC_LOOP).await;
    let serving = spawn("server", server.serve(listener, peers, stop.clone()));
    if let Some(address) = args.common.metrics_listen {
        let serve = quintlet_kit::server::serve_metrics(address, stop.clone());
        tasks.spawn("metrics", async move {
            if let Err(error) = serve.await {
                tracing::error!(%error, %address, "metrics are not served");
            }
        });
    }

    let (sources, kinds) = sources(&args, client.clone(), &settings.node_name, &tasks, &stop);
    let labels = args.labels();
    let admission = Arc::new(admission::NodeAdmission::new(
        settings,
        &labels,
        view,
        client,
        runtime_state,
        shutting_down,
    ));
    let dirs = LogDirs { pods: ctx.node.pod_logs_dir.clone(), containers: ctx.container_logs_dir.clone() };
    let (runtime, clock) = (ctx.runtime.clone(), ctx.clock.clone());
    let logs =
        pod_sync_logs::run(Arc::clone(&ctx), runtime, clock, dirs, args.container_logs(), stop.clone());
    tasks.spawn("container-logs", logs);
    let mut manager = PodManager::new(ctx, manifests, admission, &kinds);
    manager.restore(known);
    let limit = STUCK.max(args.sync_frequency.saturating_mul(2));
    tasks.spawn("watch-sync-loop", manager.heartbeat().watch(SYNC_LOOP, limit, health, stop.clone()));
    manager.run(sources, drain, stop.clone()).await;

    stop.cancel();
    let late = tasks.shutdown(GRACE).await;
    if !late.is_empty() {
        tracing::warn!(?late, "tasks did not end in time");
    }
    serving.await?.context("server")?;
    drop(owner);
    Ok(())
}

/// A loop that has not come round for so long is stuck (pkg/kubelet/kubelet.go:syncLoopHealthCheck).
const STUCK: std::time::Duration = std::time::Duration::from_secs(300);
fn credentials(args: &Args, clock: &Clock) -> anyhow::Result<Credentials> {
    let plugins = match (&args.pulls.provider_config, &args.pulls.provider_bin_dir) {
        (Some(config), Some(bin_dir)) => Some(Plugins::load(config, bin_dir, clock.clone())?),
        // The command line asks for both or neither.
        (None, _) | (_, None) => None,
    };
    Ok(Credentials::new(NodeFiles::new(&ConfigDirs::of_this_process(&args.root_dir)), plugins))
}

/// A connection on which nothing came for so long is dead, and a list on it is asked for anew. Longer than any watch that
/// has nothing to tell.
const SILENCE: std::time::Duration = std::time::Duration::from_secs(300);

async fn client(args: &Args) -> anyhow::Result<Option<kube::Client>> {
    let Some(path) = &args.kubeconfig else { return Ok(None) };
    let read = kube::config::Kubeconfig::read_from(path).with_context(|| format!("{}", path.display()))?;
    let mut config =
        kube::Config::from_custom_kubeconfig(read, &kube::config::KubeConfigOptions::default()).await?;
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    Ok(Some(kube::Client::try_from(config)?))
}

fn sources(
    args: &Args,
    client: Option<kube::Client>,
    node: &str,
    tasks: &TaskGroup,
    stop: &CancellationToken,
) -> (mpsc::Receiver<pod_sync_sources::SourceMessage>, Vec<SourceKind>) {
    let (tx, rx) = mpsc::channel(pod_sync_sources::SOURCE_QUEUE);
    let mut kinds = Vec::new();
    if let Some(path) = &args.manifests {
        kinds.push(SourceKind::File);
        let run = pod_sync_sources::file::run(
            path.clone(),
            node.to_owned(),
            args.file_check_frequency,
            tx.clone(),
            stop.clone(),
        );
        tasks.spawn("source-file", run);
    }
    if let Some(url) = &args.manifest_url {
        kinds.push(SourceKind::Http);
        let headers = args.manifest_url_header.clone();
        let run = pod_sync_sources::http::run(
            url.clone(),
            headers,
            node.to_owned(),
            args.http_check_frequency,
            pod_sync_sources::http::system_tls(),
            tx.clone(),
            stop.clone(),
        );
        tasks.spawn("source-http", run);
    }
    if let Some(client) = client {
        kinds.push(SourceKind::Api);
        tasks.spawn("source-api", pod_sync_sources::api::run(client, node.to_owned(), tx, stop.clone()));
    } else {
        // Without any source the loop still keeps what it has.
        tasks.spawn("sources-open", {
            let stop = stop.clone();
            async move {
                stop.cancelled().await;
                drop(tx);
            }
        });
    }
    (rx, kinds)
}

async fn unhealthy_events(
    ctx: Arc<Context>,
    mut unhealthy: mpsc::Receiver<pod_sync_clients::ProbeFailure>,
    stop: CancellationToken,
) {
    loop {
        // What still waits at the end is lost, like events on their way.
        let u = tokio::select! {
            () = stop.cancelled() => return,
            u = unhealthy.recv() => u,
        };
        let Some(u) = u else { return };
        let Some(view) = ctx.views.get(&u.uid) else { continue };
        let init = quintlet_model::pod::init_containers(&view.pod).iter().any(|c| c.name == u.container);
        let list = if init { "initContainers" } else { "containers" };
        let path = format!("spec.{list}{{{}}}", u.container);
        ctx.events.pod(&view.pod, EventType::Warning, &u.reason, &u.message, &path);
    }
}
