//! The task that compares the states, and the tasks that execute operations.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::StorageHealthCondition;
use pod_sync_clients::{EventType, NodeCsiDriver, NodeCsiDrivers, NodeVolumesState};
use pod_sync_csi::drivers::{CsiNode, CsiNodeDriver};
use pod_sync_direct_volumes::ownership;
use pod_sync_in_tree::volume::Plugin;
use pod_sync_volume_reconcile::VolumeName;
use pod_sync_volume_reconcile::actual::Certainty;
use pod_sync_volume_reconcile::reconcile::{Operation, volumes_in_use};
use quintlet_kit::contain::Work;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::claims::Source;
use crate::expansion::{self, Expanded, NotExpanded};
use crate::mount_in_tree::{self, ALREADY_MOUNTED};
use crate::state::{Done, Job};
use crate::tasks::Shared;
use crate::work::{self, Attempt, OperationStep, ProgressReceivers};

/// Reason why this node attaches no volumes (`pkg/volume/csi: csiAttacher.Attach`).
const NO_ATTACHER: &str = "attaching volumes from the kubelet is not supported";

impl Shared {
    /// Compares the states after each change until `stop` is cancelled.
    pub(crate) async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut changed = self.changed.subscribe();
        let mut registered = self.drivers.csi_node();
        let mut known: BTreeSet<String> = BTreeSet::new();
        let mut removed: BTreeSet<String> = BTreeSet::new();
        let mut node = self.node_volumes.state();
        loop {
            changed.borrow_and_update();
            self.read_node(&node.borrow_and_update());
            let csi_node = registered.borrow_and_update().clone();
            let drivers: BTreeSet<String> = csi_node.drivers.keys().cloned().collect();
            for driver in drivers.difference(&known) {
                self.state.lock().driver_registered(driver);
            }
            removed.extend(known.difference(&drivers).cloned());
            removed.retain(|driver| !drivers.contains(driver));
            known = drivers;
            self.node_volumes.set_drivers(reported(csi_node, &removed, self.health.storage()));
            let next = self.reconcile();
            let due = async {
                match next {
                    Some(next) => tokio::time::sleep_until(next).await,
                    None => std::future::pending().await,
                }
            };
            // Each arm only says that something has changed, which the next pass reads.
            tokio::select! {
                () = stop.cancelled() => return,
                _ = changed.changed() => {}
                _ = registered.changed() => {}
                _ = node.changed() => {}
                () = due => {}
            }
        }
    }

    fn read_node(&self, node: &NodeVolumesState) {
        let (in_use, attached) = match node {
            NodeVolumesState::Unknown => return,
            NodeVolumesState::NoApi => (BTreeSet::new(), BTreeSet::new()),
            NodeVolumesState::Known { in_use, attached } => {
                let in_use = in_use.iter().map(|name| parsed(name)).collect();
                (in_use, attached.keys().map(|name| parsed(name)).collect())
            }
        };
        let mut state = self.state.lock();
        if state.actual.needs_attachments() {
            let list: Vec<VolumeName> = attached.iter().cloned().collect();
            state.actual.attachments_known(&list);
        }
        state.node.attached = attached;
        state.node.reported_in_use = in_use;
    }

    fn reconcile(self: &Arc<Self>) -> Option<Instant> {
        let mut state = self.state.lock();
        let (jobs, next) = state.plan(Instant::now());
        let in_use = state.node.pods_known.then(|| volumes_in_use(&state.desired, &state.actual));
        drop(state);
        if let Some(in_use) = in_use {
            self.node_volumes.set_in_use(in_use.iter().map(ToString::to_string).collect());
        }
        for (operation, job) in jobs {
            drop(task::spawn("volume operation", Arc::clone(self).execute(operation, job)));
        }
        next
    }

    /// Executes an operation. A panic fails the operation.
    async fn execute(self: Arc<Self>, operation: Operation, job: Job) {
        let name = |pod: &Pod| {
            let text = |value: &Option<String>| value.clone().unwrap_or_default();
            format!("{}/{}", text(&pod.metadata.namespace), text(&pod.metadata.name))
        };
        let work = match &job {
            Job::Mount { pod, volume, .. } | Job::Expand { pod, volume, .. } => {
                Some(Work::new(pod.to_string(), name(&volume.pod)))
            }
            Job::Unmount { pod, .. } => Some(Work::new(pod.to_string(), String::new())),
            Job::UnmountDevice { .. } | Job::Attach { .. } | Job::Detach => None,
        };
        let (plugin, is_forced) = {
            let state = self.state.lock();
            (state.plugin(&operation.key().volume).cloned(), state.is_forced(&operation))
        };
        let (name_in_metrics, began) = (job.operation_name(), Instant::now());
        let (executor, key) = (Arc::clone(&self), operation.key());
        let done = task::spawn_contained("volume operation call", work, async move {
            let at = |step: OperationStep| {
                let mut state = executor.state.lock();
                if let Some(running) = state.running.get_mut(&key) {
                    running.step = Some(step);
                    running.since = Instant::now();
                }
                drop(state);
                executor.changed.send_modify(|count| *count = count.wrapping_add(1));
            };
            executor.run_job(job, &at).await
        });
        let done = done.await;
        let (now, wall) = (Instant::now(), self.tools.clock.wall());
        let is_ok = matches!(&done, Ok(Ok(done)) if done.is_ok());
        let took = now.saturating_duration_since(began);
        self.tools.metrics.completed(plugin.as_ref(), name_in_metrics, is_ok, took);
        if is_forced {
            self.tools.metrics.force_cleaned(is_ok);
        }
        self.change(|state| match done {
            Ok(Ok(done)) => state.done(&operation, done, now, wall),
            Ok(Err(panic)) => state.panicked(&operation, &panic.message, now, wall),
            // The process ends.
            Err(error) => state.panicked(&operation, &error.to_string(), now, wall),
        });
    }

    async fn run_job(&self, job: Job, at: &(dyn Fn(OperationStep) + Send + Sync)) -> Done {
        match job {
            Job::Mount { pod, volume, is_taken: true, .. } => {
                let text =
                    "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
                let failure = volume.failure("SetUp", text, Certainty::Transient);
                self.report(&pod, &volume.pod, &failure);
                Done::Mount(failure.into())
            }
            Job::Mount { pod, volume, stage, mounted_before, failed_before, is_taken: false, released } => {
                let slow = |message: String| {
                    let (reason, certainty) = (ownership::IN_PROGRESS, Certainty::Finished);
                    self.report(&pod, &volume.pod, &work::Failure { reason, message, certainty });
                };
                let receivers = ProgressReceivers { at, slow: &slow };
                let mounted = match (work::check_node(&self.tools, &volume), &volume.provided.source) {
                    (Err(failure), _) => failure.into(),
                    (Ok(()), Source::Csi(csi)) => {
                        let tools = &self.tools;
                        let attempt = Attempt { stage, mounted_before, failed_before };
                        let mount = work::mount(tools, &volume, csi, &pod, attempt, receivers);
                        // Boxed: the futures of gRPC calls are large.
                        Box::pin(mount).await
                    }
                    (Ok(()), Source::InTree(in_tree)) => {
                        let attempt = Attempt { stage, mounted_before, failed_before };
                        let mount = mount_in_tree::mount(
                            &self.tools,
                            &volume,
                            in_tree,
                            &pod,
                            attempt,
                            receivers,
                            &released,
                        );
                        let (mounted, warning) = Box::pin(mount).await;
                        if let Some(message) = warning {
                            let (reason, certainty) = (ALREADY_MOUNTED, Certainty::Finished);
                            self.report(&pod, &volume.pod, &work::Failure { reason, message, certainty });
                        }
                        mounted
                    }
                };
                match &mounted.result {
                    Err(failure) => self.report(&pod, &volume.pod, failure),
                    Ok(()) => {
                        for message in volume.mapped(&self.tools, &pod) {
                            let reason = "SuccessfulMountVolume";
                            self.events.pod(&volume.pod, EventType::Normal, reason, &message, "");
                        }
                    }
                }
                Done::Mount(mounted)
            }
            Job::Expand { pod, volume, failed_before } => {
                let Some(sizes) = &volume.provided.sizes else {
                    return Done::Expanded(Ok(Expanded::NotRequested));
                };
                at(OperationStep::Expand);
                let expand = expansion::expand(&self.tools, &volume, sizes, &pod, false, failed_before);
                let expanded = Box::pin(expand).await;
                Done::Expanded(expanded.map_err(|failure| {
                    let (name, text) = (&volume.desired.spec_name, &failure.text);
                    let text =
                        format!("NodeExpandVolume.NodeExpandVolume failed for volume {name:?} : {text}");
                    self.events.pod(&volume.pod, EventType::Warning, "VolumeResizeFailed", &text, "");
                    NotExpanded { text, ..failure }
                }))
            }
            Job::Attach { volumes } => {
                let mut text = String::new();
                for volume in volumes {
                    text = format!(
                        "AttachVolume.Attach failed for volume {:?} : {NO_ATTACHER}",
                        volume.desired.spec_name
                    );
                    self.events.pod(&volume.pod, EventType::Warning, "FailedAttachVolume", &text, "");
                }
                Done::NotAttached(text)
            }
            Job::Detach => {
                tracing::warn!(
                    "volume stays attached, since neither a controller nor this node detaches volumes"
                );
                Done::Detached
            }
            Job::Unmount { pod, form, spec_name } => {
                at(form.unmount_steps().0);
                Done::Unmount(work::unmount(&self.tools, &form, &pod, &spec_name).await)
            }
            Job::UnmountDevice { form } => {
                at(form.unmount_steps().1);
                Done::UnmountDevice(work::unmount_device(&self.tools, &form).await)
            }
        }
    }

    fn report(&self, uid: &PodUid, pod: &Pod, failure: &work::Failure) {
        // A pod that was released no longer needs the volume.
        if self.state.lock().is_open(uid) && !pods::is_mirror(pod) {
            self.events.pod(pod, EventType::Warning, failure.reason, &failure.message, "");
        }
    }
}

/// Returns the drivers for the CSINode and Node objects.
fn reported(
    node: CsiNode,
    removed: &BTreeSet<String>,
    mut storage: BTreeMap<String, Vec<StorageHealthCondition>>,
) -> NodeCsiDrivers {
    let reported_driver = |(name, driver): (String, CsiNodeDriver)| {
        let CsiNodeDriver { node_id, topology, allocatable } = driver;
        let storage_health = storage.remove(&name);
        (name, NodeCsiDriver { node_id, topology, allocatable, storage_health })
    };
    NodeCsiDrivers {
        registered: node.drivers.into_iter().map(reported_driver).collect(),
        removed: removed.clone(),
    }
}

/// Returns a unique name as the API server has it.
fn parsed(name: &str) -> VolumeName {
    let of_plugin = |plugin: &str| {
        let rest = name.strip_prefix(plugin)?.strip_prefix('/')?;
        Some(VolumeName::shared(plugin, rest))
    };
    let plugins = [pod_sync_csi::PLUGIN, Plugin::Iscsi.name(), Plugin::Fc.name()];
    plugins.into_iter().find_map(of_plugin).unwrap_or_else(|| VolumeName::shared("", name))
}
