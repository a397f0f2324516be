//! The start of pod-sync. [`Agent::open`] opens the state and makes the clients. The stages start the tasks:
//! each is a type with the fields that it uses.

mod api;
mod cgroups;
mod claims;
mod clients;
mod machine;
mod maintenance;
mod node;
mod node_name;
mod placement;
mod process_tasks;
mod server;
mod sources;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use pod_sync_certificates::PodCertificateContext;
use pod_sync_claims::{ClaimContext, Claims};
use pod_sync_clients::{Events, Pleg, Probes, Runtime, Statuses, UnsentEvents, WorkerWakeups};
use pod_sync_containment::Containment;
use pod_sync_decisions::backoff::BackoffDelays;
use pod_sync_devices::{DeviceContext, Devices};
use pod_sync_direct_volumes::Volumes;
use pod_sync_direct_volumes::mount_table::ProcMountTable;
use pod_sync_images::credentials::Credentials;
use pod_sync_images::credentials::node_files::{ConfigDirs, NodeFiles};
use pod_sync_images::credentials::plugins::Plugins;
use pod_sync_images::pull_records::PullRecords;
use pod_sync_images::pulls::PullLimits;
use pod_sync_layout::{NodeSettings, RuntimeState};
use pod_sync_metrics::PodMetrics;
use pod_sync_records::{Allocations, IdPool, PodRecord, StateDir, UserNamespaces};
use pod_sync_views::PodViews;
use pod_sync_volume_manager::{VolumeTasks, VolumeTasksContext};
use pod_sync_volume_usage::Measured;
use pod_sync_worker::context::{
    Checkpoints, ENV_FILES, FaultIsolation, ImagePulls, NodeConfig, PodDirs, PodEnvironment, Reporting,
    RuntimeAccess, WorkerContext, WorkerControl,
};
use pod_sync_worker::{PodWorkers, ProbeRates, StaticPodGate};
use quintlet_cgroups::Cgroups;
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_kit::clock::Clock;
use quintlet_kit::grant::GrantKey;
use quintlet_kit::stalls::Stalls;
use quintlet_model::ids::PodUid;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(crate) use self::cgroups::CGROUP_FS;

use self::api::ApiAccess;
use self::clients::{ClientChannels, ClientTasks};
use self::maintenance::MaintenanceTasks;
use self::node::NodeTasks;
use self::process_tasks::ProcessTasks;
use self::server::Servers;
use self::sources::SourceTasks;
use crate::args::{Args, CgroupDriver};
use crate::image_gc::ImageGcContext;
use crate::pod_manager;
use crate::settings::settings;

/// Directory of the socket at which device plugins register, below the root directory.
const DEVICE_PLUGINS: &str = "device-plugins";

/// pod-sync with its state open, before and while its tasks run.
pub(crate) struct Agent {
    pub(crate) tasks: ProcessTasks,
    args: Args,
    paths: Paths,
    ctx: Arc<WorkerContext>,
    api: ApiAccess,
    measured: Arc<Measured>,
    image_gc: ImageGcContext,
}

impl Agent {
    // Blocks: there is no pod before the start.
    /// Opens the state and makes the clients. Only the volume tasks run already.
    pub(crate) async fn open(
        args: Args,
        clock: Clock,
        epoch: u64,
        stop: CancellationToken,
    ) -> anyhow::Result<(Self, ClientChannels)> {
        let paths = args.common.paths();
        let settings = settings(&args)?;
        let reservations = args.resources.enforced_reservations()?;
        let warnings = machine::check(&args, settings.cgroup_v2)?;
        create_directories(&args)?;
        let node = Arc::new(node_config(&args, &paths, settings, epoch)?);
        let resizes_volumes = args.resources.field_gates().memory_volume_resize;
        let checkpoints = Arc::new(Checkpoints {
            records: StateDir::open(&paths.state_dir(), quintlet_kit::boot::boot_id())?,
            allocations: Allocations::open(&args.root_dir, &paths.state_dir(), resizes_volumes),
        });
        let containment = Containment::open(&paths, quintlet_kit::boot::boot_id(), clock.clone())
            .context("failed to open the containment records")?;
        let wakeups = Arc::new(WorkerWakeups::default());
        let (api, objects) = ApiAccess::open(&args, &paths, &wakeups, &clock, &stop).await?;
        let (runtime, runtime_state) = runtime_access(&args, &paths, epoch, &clock, &wakeups);
        let (probes, probe_failures) = Probes::new(paths.probe_dir(), Arc::clone(&wakeups));
        let unsent = UnsentEvents::open(paths.state_dir().join(".events"), &quintlet_kit::boot::boot_id());
        let reporting = Arc::new(Reporting {
            statuses: Arc::new(Statuses::new(paths.status(), Arc::clone(&wakeups))),
            events: Events::new(paths.status(), unsent, clock.clone(), stop.clone()),
            views: PodViews::default(),
            metrics: PodMetrics::default(),
        });
        machine::warn(&warnings, &reporting.events, &node.settings.node_name);
        let tokens = api.tokens();
        let certificates = PodCertificateContext {
            node: node.settings.node_name.clone(),
            nodes: api.cluster.nodes(),
            events: reporting.events.clone(),
            wakeups: Arc::clone(&wakeups),
            clock: clock.clone(),
        };
        let credentials = api.credentials(&args, certificates, &stop);
        let volumes = Volumes::new(args.root_dir.clone())
            .with_credentials(credentials)
            .with_quotas(args.resources.project_quotas(&args.root_dir));
        let devices = Devices::open(DeviceContext {
            dir: args.root_dir.join(DEVICE_PLUGINS),
            copy_dir: paths.state_dir(),
            clock: clock.clone(),
            wakeups: Arc::clone(&wakeups),
            stop: stop.clone(),
        });
        let devices = devices.context("failed to open the directory of device plugins")?;
        let claims = Claims::open(ClaimContext {
            dir: args.root_dir.clone(),
            copy_dir: paths.state_dir(),
            clock: clock.clone(),
            wakeups: Arc::clone(&wakeups),
            source: Arc::new(claims::ApiClaims(api.client.clone())),
            stop: stop.clone(),
        });
        let placement = placement::open(&args, &node.settings, &clock)?;
        let volume_tasks = VolumeTasksContext {
            root_dir: args.root_dir.clone(),
            volumes: volumes.clone(),
            node: node.settings.node_name.clone(),
            objects: api.volume_objects(),
            tokens: tokens.clone(),
            status_reporter: paths.status(),
            controller_attaches: args.enable_controller_attach_detach,
            selinux_root: node.settings.selinux.then(|| args.selinux_root.clone()),
            selinux_mount: args.resources.mounts_selinux_labels(),
            commands: args.disks.commands(),
            host: args.disks.host(),
            nodes: api.cluster.nodes(),
            plugin_handlers: [
                (pod_sync_devices::PLUGIN_TYPE.to_owned(), devices.handler()),
                (pod_sync_claims::PLUGIN_TYPE.to_owned(), claims.handler()),
            ]
            .into(),
            events: reporting.events.clone(),
            clock: clock.clone(),
        };
        let volume_tasks = VolumeTasks::start(volume_tasks, stop.clone());
        let volume_tasks = volume_tasks.await.context("failed to read the volumes of pods")?;
        let environment = Arc::new(PodEnvironment {
            cgroups: cgroups(&args, &node.settings),
            volumes,
            volume_tasks,
            devices,
            claims,
            placement,
            objects: api.with_offline(Arc::new(objects)),
            tokens,
            offline: api.offline.clone(),
            trust_anchors: api.trust_anchors(&args, &stop),
            user_namespaces: UserNamespaces::new(
                &args.root_dir,
                IdPool::of_host(node.settings.max_pods, args.resources.ids_per_pod)?,
            ),
            env_files: Stalls::new("variable file", ENV_FILES),
        });
        let probe_rates = Arc::new(ProbeRates::new(node.settings.probe_rates, Arc::clone(&wakeups)));
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
            probe_rates,
            control,
            faults: Arc::new(FaultIsolation::new(containment, Arc::clone(&reporting), wakeups)),
            reporting,
            clock,
        });
        let image_gc = ImageGcContext::new(&ctx, args.images.policy());
        let (tasks, measured) = (ProcessTasks::new(stop), Arc::default());
        let agent = Self { tasks, args, paths, ctx, api, measured, image_gc };
        Ok((agent, ClientChannels { reservations, runtime_state, probe_failures }))
    }

    /// Loads the records of an earlier run. Readers of the views wait for the pods in them.
    pub(crate) fn load_records(&self) -> Vec<(PodUid, PodRecord)> {
        let records = self.ctx.checkpoints.records.load();
        let with_pod = records.iter().filter(|(_, record)| pod_manager::has_pod(record));
        self.ctx.reporting.views.expect_restored(with_pod.map(|(uid, _)| uid.clone()));
        records
    }

    /// Writes the allocations that changed last to the files that a kubelet reads.
    pub(crate) async fn write_allocations(&self) {
        self.ctx.checkpoints.allocations.write_files().await;
    }

    pub(crate) fn clients(&self) -> ClientTasks<'_> {
        let Self { tasks, ctx, args, paths, .. } = self;
        ClientTasks { tasks, ctx, args, paths }
    }

    pub(crate) fn maintenance(&self) -> MaintenanceTasks<'_> {
        let Self { tasks, ctx, args, paths, measured, image_gc, .. } = self;
        MaintenanceTasks { tasks, ctx, args, paths, measured, image_gc }
    }

    pub(crate) fn node(&self) -> NodeTasks<'_> {
        let Self { tasks, ctx, args, paths, api, .. } = self;
        NodeTasks { tasks, ctx, args, paths, api }
    }

    pub(crate) fn servers(&self) -> Servers<'_> {
        let Self { tasks, ctx, args, paths, api, measured, .. } = self;
        Servers { tasks, ctx, args, paths, api, measured }
    }

    pub(crate) fn sources(&self) -> SourceTasks<'_> {
        let Self { tasks, ctx, args, api, .. } = self;
        SourceTasks { tasks, ctx, args, api }
    }
}

fn create_directories(args: &Args) -> anyhow::Result<()> {
    let root_dir = &args.root_dir;
    pod_sync_direct_volumes::layout::prepare_root(root_dir)?;
    match pod_sync_direct_volumes::layout::share_root(root_dir, &ProcMountTable) {
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
    let pod_dirs = PodDirs::default();
    // For pods of a kubelet that had this root directory before.
    let _known = pod_dirs.list(&args.root_dir);
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
        pod_dirs,
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
