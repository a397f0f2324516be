//! Starts the tasks that look after the node: shutdown, image garbage collection, measurements, log rotation,
//! eviction, the kernel's log, shared CPUs.

use std::path::PathBuf;
use std::sync::Arc;

use pod_sync_clients::EventType;
use pod_sync_decisions::status::KillCause;
use pod_sync_eviction::manager::EvictionSettings;
use pod_sync_eviction_loop::Published;
use pod_sync_eviction_loop::kernel_log::{self, SYSTEM_OOM, Victim};
use pod_sync_logs::LogDirs;
use pod_sync_placement::ReconcileContext;
use pod_sync_records::PodRecord;
use pod_sync_volume_usage::{Measured, Pods as _, StorageSettings};
use pod_sync_worker::context::WorkerContext;
use quintlet_kit::args::paths::Paths;
use quintlet_model::ids::PodUid;
use tokio::sync::watch;

use super::cgroups::CGROUP_FS;
use super::process_tasks::ProcessTasks;
use crate::args::Args;
use crate::eviction::{EvictionContext, EvictionNode};
use crate::image_gc::{self, ImageGcContext};
use crate::shutdown::ActivePods;
use crate::storage::{LoggedPods, MeasuredPods};
use crate::volumes::MountedVolumes;

/// File below the state directory: the position in the kernel's log up to which kills were reported.
const KERNEL_LOG_POSITION: &str = ".kernel-log";

/// Starts the tasks that look after the node.
pub(crate) struct MaintenanceTasks<'a> {
    pub(super) tasks: &'a ProcessTasks,
    pub(super) ctx: &'a Arc<WorkerContext>,
    pub(super) args: &'a Args,
    pub(super) paths: &'a Paths,
    pub(super) measured: &'a Arc<Measured>,
    pub(super) image_gc: &'a ImageGcContext,
}

impl MaintenanceTasks<'_> {
    /// Starts the task that gives running containers the CPUs that they share.
    pub(crate) fn reconcile_cpus(&self) {
        let ctx = self.ctx;
        let reporting = Arc::clone(&ctx.reporting);
        let context = ReconcileContext {
            calls: ctx.runtime.calls.clone(),
            pleg: Arc::clone(&ctx.runtime.pleg),
            is_managed: Box::new(move |uid| reporting.views.get(uid).is_some()),
            period: self.args.placement.cpu_manager_reconcile_period,
            stop: self.tasks.stop.clone(),
        };
        self.tasks.spawn("reconcile-cpus", ctx.environment.placement.clone().reconcile(context));
    }

    /// Starts the graceful node shutdown. Returns whether the node is shutting down.
    pub(crate) fn start_shutdown(&self) -> anyhow::Result<watch::Receiver<bool>> {
        let ctx = self.ctx;
        let (shutting_down_tx, shutting_down) = watch::channel(false);
        let active = ActivePods { reporting: Arc::clone(&ctx.reporting), control: Arc::clone(&ctx.control) };
        let node = pod_sync_shutdown::ShutdownContext {
            name: ctx.node.settings.node_name.clone(),
            root_dir: ctx.node.settings.root_dir.clone(),
            events: ctx.reporting.events.clone(),
            metrics: ctx.reporting.metrics.clone(),
            clock: ctx.clock.clone(),
        };
        let (plan, login) = (self.args.shutdown.plan()?, Box::new(self.args.shutdown.login()));
        let shutdown =
            pod_sync_shutdown::run(active, node, plan, login, shutting_down_tx, self.tasks.stop.clone());
        self.tasks.spawn("shutdown", shutdown);
        Ok(shutting_down)
    }

    /// Starts image garbage collection, the measurement of volumes and the rotation of logs.
    pub(crate) fn start(&self) {
        let stop = &self.tasks.stop;
        let images = self.image_gc.clone();
        self.tasks.spawn("pull-intents", image_gc::recover_pulls(images.clone(), stop.clone()));
        self.tasks.spawn("image-gc", image_gc::run(images, stop.clone()));
        self.start_measurement();
        self.start_log_rotation();
        if self.args.machine.make_iptables_util_chains == Some(true) {
            let iptables = Arc::new(pod_sync_node_object::SystemIptables::default());
            self.tasks.spawn("iptables", pod_sync_node_object::keep_chains(iptables, stop.clone()));
        }
        if let Some(log) = &self.args.process.kernel_log {
            self.tasks.spawn("kernel-log", self.report_kills(log.clone()));
        }
    }

    /// Reports processes that the kernel killed because the node had no memory left.
    fn report_kills(&self, log: PathBuf) -> impl Future<Output = ()> + Send + use<> {
        let position = self.paths.state_dir().join(KERNEL_LOG_POSITION);
        let (events, node) = (self.ctx.reporting.events.clone(), self.ctx.node.settings.node_name.clone());
        let stop = self.tasks.stop.clone();
        async move {
            let report = |victim: &Victim| {
                events.node(&node, EventType::Warning, SYSTEM_OOM, &victim.to_string());
            };
            let kills = kernel_log::watch(&log, position, quintlet_kit::boot::boot_id(), report);
            // Cancellation drops no kill: the next process reports it.
            stop.run_until_cancelled(kills).await;
        }
    }

    fn start_measurement(&self) {
        let (ctx, stop) = (self.ctx, &self.tasks.stop);
        let root_dir = &ctx.node.settings.root_dir;
        let pods = Arc::new(MeasuredPods {
            reporting: Arc::clone(&ctx.reporting),
            control: Arc::clone(&ctx.control),
            faults: Arc::clone(&ctx.faults),
        });
        let tasks = ctx.environment.volume_tasks.clone();
        let of_tasks = move || {
            let counts = tasks.counts();
            (counts.desired, counts.actual)
        };
        let count = pod_sync_volume_usage::count_volumes(of_tasks, stop.clone());
        self.tasks.spawn("volume-counts", count);
        let storage = StorageSettings {
            root_dir: root_dir.clone(),
            period: self.args.resources.volume_stats_agg_period,
            clock: ctx.clock.clone(),
            metrics: ctx.reporting.metrics.clone(),
            quotas: ctx.environment.volumes.quotas(),
        };
        let mounted = Arc::new(MountedVolumes { tasks: ctx.environment.volume_tasks.clone() });
        if ctx.node.settings.volume_health {
            let (pods, control) = (Arc::clone(&pods), Arc::clone(&ctx.control));
            let health = ctx.environment.volume_tasks.clone().watch_health(
                move || pods.running().into_iter().map(|(uid, _)| uid).collect(),
                move |uid| control.wakeups.wake(uid),
                storage.period,
                stop.clone(),
            );
            self.tasks.spawn("volume-health", health);
        }
        let usage = pod_sync_volume_usage::run_provided(
            Arc::clone(&pods),
            mounted,
            Arc::clone(self.measured),
            storage.clone(),
            stop.clone(),
        );
        self.tasks.spawn("volume-usages", usage);
        let measure = pod_sync_volume_usage::run(pods, Arc::clone(self.measured), storage, stop.clone());
        self.tasks.spawn("storage", measure);
    }

    fn start_log_rotation(&self) {
        let ctx = self.ctx;
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
        let logs = pod_sync_logs::run(
            logged_pods,
            runtime,
            clock,
            dirs,
            self.args.container_logs(),
            self.tasks.stop.clone(),
        );
        self.tasks.spawn("container-logs", logs);
    }

    /// Returns the loop of evictions, which starts after the pods of `records` are restored. Returns `None`
    /// if nothing is ever evicted.
    pub(crate) fn evictions(
        &self,
        records: &[(PodUid, PodRecord)],
        published: Published,
    ) -> anyhow::Result<Option<impl Future<Output = ()> + Send + use<>>> {
        let ctx = self.ctx;
        let Some(settings) = self.args.eviction.settings(self.args.resources.enforces_pods())? else {
            return Ok(None);
        };
        let skips_memory_volumes = ctx.node.settings.field_gates.memory_volume_resize;
        let settings = EvictionSettings { skips_memory_volumes, ..settings };
        let is_evicted = |record: &PodRecord| {
            let killed_as =
                record.termination.as_ref().and_then(|termination| termination.killed_as.as_ref());
            killed_as.is_some_and(|killed| killed.cause == KillCause::Evicted)
        };
        let evicted = records.iter().filter(|(_, record)| is_evicted(record)).map(|(uid, _)| uid.clone());
        let node = EvictionNode::new(EvictionContext {
            quotas: ctx.environment.volumes.quotas(),
            clock: ctx.clock.clone(),
            node: Arc::clone(&ctx.node),
            runtime: ctx.runtime.clone(),
            reporting: Arc::clone(&ctx.reporting),
            control: Arc::clone(&ctx.control),
            images: self.image_gc.clone(),
            measured: Arc::clone(self.measured),
            paths: pod_sync_eviction_loop::measure::Paths {
                root_dir: ctx.node.settings.root_dir.clone(),
                pod_logs_dir: ctx.node.settings.pod_logs_dir.clone(),
                cgroups: PathBuf::from(CGROUP_FS),
                cgroup_root: self.args.cgroup_root.clone(),
                proc: PathBuf::from("/proc"),
                subtracts_huge_pages: self.args.resources.subtracts_huge_pages(),
            },
            evicted: evicted.collect(),
            has_memory_alarm: self.args.eviction.kernel_memcg_notification,
        });
        Ok(Some(pod_sync_eviction_loop::run(node, settings, published, self.tasks.stop.clone())))
    }
}
