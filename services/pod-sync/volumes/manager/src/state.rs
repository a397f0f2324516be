//! The state behind the handle: what the task compares, and what operations report.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use pod_sync_csi::PLUGIN;
use pod_sync_csi::paths::Root;
use pod_sync_direct_volumes::found::FoundVolume;
use pod_sync_volume_reconcile::VolumeName;
use pod_sync_volume_reconcile::actual::{Actual, Certainty, Expansion};
use pod_sync_volume_reconcile::desired::{Desired, DesiredVolume, Reach};
use pod_sync_volume_reconcile::operations::{OperationKey, Operations};
use pod_sync_volume_reconcile::reconcile::{NodeVolumeFacts, Operation, ReconcilePlan, reconcile};
use pod_sync_volume_reconcile::reconstruct::reconstruct;
use pod_sync_volume_reconcile::wait::{TIMED_OUT, still_mounted};
use quintlet_model::ids::PodUid;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::claims::Provided;
use crate::expansion::{Expanded, NotExpanded};
use crate::found::OnDisk;
use crate::in_tree;
use crate::metrics::PluginLabel;
use crate::resolve::{Resolution, Resolved};
use crate::selinux::{self, Finding};
use crate::work::{Form, Mounted, OperationStep};

/// An operation in flight.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    /// The pod that the operation is for; `None` for a device.
    pub(crate) pod: Option<PodUid>,
    /// The step in progress; `None` before the first one.
    pub(crate) step: Option<OperationStep>,
    /// When the step began.
    pub(crate) since: Instant,
}

/// An operation to start, with what it needs.
#[derive(Debug)]
pub(crate) enum Job {
    /// Mounts a volume for a pod.
    Mount {
        pod: PodUid,
        volume: Arc<Resolved>,
        stage: bool,
        mounted_before: bool,
        /// The driver has refused an expansion of the volume.
        failed_before: bool,
        /// Another pod has the volume, whose access mode is ReadWriteOncePod.
        is_taken: bool,
        /// Is cancelled when the pod is released.
        released: CancellationToken,
    },
    /// Unmounts a pod's volume.
    Unmount {
        pod: PodUid,
        form: Form,
        spec_name: String,
    },
    UnmountDevice {
        form: Form,
    },
    /// Attaches a volume from the node, for the pods that need it.
    Attach {
        volumes: Vec<Arc<Resolved>>,
    },
    /// Detaches a volume from the node.
    Detach,
    /// Expands a volume that a pod has.
    Expand {
        pod: PodUid,
        volume: Arc<Resolved>,
        /// The driver has refused an expansion of the volume.
        failed_before: bool,
    },
}

/// Volumes of a pod are mounted after the wait for their unmount.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct StillMounted {
    /// The kubelet's text.
    pub text: String,
    /// Time until the failed operation is due; `None` if the time is the caller's choice.
    pub retry_after: Option<Duration>,
}

/// The result of a job.
#[derive(Debug)]
pub(crate) enum Done {
    Mount(Mounted),
    Unmount(Result<(), String>),
    UnmountDevice(Result<(), String>),
    /// The kubelet's text of why the volume is not attached.
    NotAttached(String),
    Detached,
    Expanded(Result<Expanded, NotExpanded>),
}

impl Job {
    /// Returns the name of the operation in metrics.
    pub(crate) fn operation_name(&self) -> &'static str {
        match self {
            Self::Mount { volume, .. } if volume.provided.is_block => "map_volume",
            Self::Mount { .. } => "volume_mount",
            Self::Unmount { form, .. } if is_block(form) => "unmap_volume",
            Self::Unmount { .. } => "volume_unmount",
            Self::UnmountDevice { form } if is_block(form) => "unmap_device",
            Self::UnmountDevice { .. } => "unmount_device",
            Self::Attach { .. } => "volume_attach",
            Self::Detach => "volume_detach",
            Self::Expand { .. } => "volume_fs_resize",
        }
    }
}

fn is_block(form: &Form) -> bool {
    match form {
        Form::FileSystem { .. } => false,
        Form::Block { .. } => true,
        Form::InTree { is_block, .. } => *is_block,
    }
}

impl Done {
    /// Returns whether the operation succeeded.
    pub(crate) fn is_ok(&self) -> bool {
        match self {
            Self::Mount(mounted) => mounted.result.is_ok(),
            Self::Unmount(result) | Self::UnmountDevice(result) => result.is_ok(),
            Self::NotAttached(_) => false,
            Self::Detached => true,
            Self::Expanded(result) => result.is_ok(),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct ManagerState {
    pub(crate) desired: Desired,
    pub(crate) actual: Actual,
    pub(crate) operations: Operations,
    /// Operations on direct volumes. Theirs and those of tasks never concern the same volume.
    pub(crate) direct_operations: Operations,
    pub(crate) node: NodeVolumeFacts,
    /// Volumes of declared pods, by the names of their PersistentVolumes and inline volumes.
    volumes: BTreeMap<(PodUid, String), Arc<Resolved>>,
    /// Declared pods. The token is cancelled when the pod is released.
    open: BTreeMap<PodUid, CancellationToken>,
    /// Errors of volumes that could not be resolved by the last declaration of their pods, by the names in
    /// these.
    pub(crate) unresolved: BTreeMap<(PodUid, String), (String, Timestamp)>,
    /// The first declaration of each volume, by pod and by the name in the pod.
    needed: BTreeMap<PodUid, BTreeMap<String, Timestamp>>,
    forms: BTreeMap<VolumeName, Form>,
    /// The plugin of each volume, for metrics.
    plugins: BTreeMap<VolumeName, PluginLabel>,
    /// Volumes of pods that were found on disk without readable metadata, until they are declared or
    /// unmounted.
    unreadable: BTreeSet<VolumeName>,
    pub(crate) running: BTreeMap<OperationKey, Running>,
    /// The last error per operation, until it succeeds.
    pub(crate) errors: BTreeMap<OperationKey, (String, Timestamp)>,
}

impl ManagerState {
    /// Adds the volumes that were found on disk. Their pods are expected to be declared or released.
    pub(crate) fn found(&mut self, disk: OnDisk) {
        for pod in disk.volumes.iter().map(|found| &found.pod) {
            self.desired.expect(pod);
        }
        self.forms.extend(disk.forms);
        self.plugins.extend(disk.plugins);
        self.unreadable = disk.unreadable;
        // The worker of the pod, or housekeeping, decides about these.
        for FoundVolume { pod, plugin, name } in disk.direct {
            self.actual.found_direct(VolumeName::of_pod(&plugin, &pod, &name), &pod, name);
        }
        // Each directory is a volume: one without metadata is unmounted like an inline one.
        reconstruct(&mut self.actual, disk.volumes, &disk.devices);
        for (name, label) in disk.labels {
            self.actual.set_device_label(&name, Some(label));
        }
    }

    /// Opens a pod for [`ManagerState::declare`], and returns the token that is cancelled when the pod is
    /// released.
    pub(crate) fn open(&mut self, pod: &PodUid) -> CancellationToken {
        self.open.entry(pod.clone()).or_default().clone()
    }

    pub(crate) fn is_open(&self, pod: &PodUid) -> bool {
        self.open.contains_key(pod)
    }

    /// Sets the volumes of a pod, unless it was released since `open`. Returns what was found about the
    /// labels of volumes that the pod did not have.
    pub(crate) fn declare(
        &mut self,
        pod: &PodUid,
        resolution: Resolution,
        open: &CancellationToken,
        root: &Root,
        wall: Timestamp,
    ) -> Vec<(Finding, Provided)> {
        let mut findings = Vec::new();
        if open.is_cancelled() {
            return findings;
        }
        let (mut desired, mut errors) = (BTreeMap::new(), resolution.errors);
        for (name, resolved) in resolution.volumes {
            let found = self.finding(pod, &resolved);
            findings.extend(found.map(|finding| (finding, resolved.provided.clone())));
            if let Some(error) = self.label_conflict(pod, &resolved.desired) {
                errors.push((name, error));
                continue;
            }
            let form = resolved.form(root);
            self.supersede(pod, &resolved, &form);
            self.forms.insert(resolved.desired.name.clone(), form);
            self.set_plugin(&resolved.desired.name, PluginLabel::of(&resolved.provided));
            if let Some(sizes) = &resolved.provided.sizes {
                self.actual.initialize_size(&resolved.desired.name, sizes.claimed);
            }
            self.actual.resume_expansion(&resolved.desired.name);
            self.need(pod, &name, wall);
            desired.insert(name, resolved.desired.clone());
            self.volumes.insert((pod.clone(), resolved.desired.spec_name.clone()), Arc::new(resolved));
        }
        self.unresolved.retain(|(owner, _), _| owner != pod);
        for (name, error) in &errors {
            self.need(pod, name, wall);
            self.unresolved.insert((pod.clone(), name.clone()), (error.clone(), wall));
        }
        self.desired.set(pod, desired, errors.into_iter().map(|(_, error)| error));
        let republished: BTreeSet<VolumeName> = self
            .volumes_of(pod)
            .filter(|volume| volume.rules.republish)
            .map(|volume| volume.desired.name.clone())
            .collect();
        self.actual.request_remount(pod, |name| republished.contains(name));
        findings
    }

    /// Returns what is counted about the labels of a volume that a pod did not have.
    fn finding(&self, pod: &PodUid, volume: &Resolved) -> Option<Finding> {
        let name = &volume.desired.name;
        if self.desired.has(pod, name) {
            return None;
        }
        let others = self.volumes.values().filter(|other| other.desired.name == *name);
        selinux::finding(&volume.labels, others.map(|other| other.labels.original.as_deref()))
    }

    pub(crate) fn plugin(&self, volume: &VolumeName) -> Option<&PluginLabel> {
        self.plugins.get(volume)
    }

    pub(crate) fn set_plugin(&mut self, volume: &VolumeName, plugin: PluginLabel) {
        self.plugins.insert(volume.clone(), plugin);
    }

    /// Returns whether an operation removes a directory whose metadata could not be read.
    pub(crate) fn is_forced(&self, operation: &Operation) -> bool {
        matches!(operation, Operation::Unmount { volume, .. } if self.unreadable.contains(volume))
    }

    /// Returns why a pod cannot have a volume that other pods should have with another SELinux label.
    fn label_conflict(&self, pod: &PodUid, volume: &DesiredVolume) -> Option<String> {
        if self.desired.has(pod, &volume.name) {
            return None;
        }
        let others =
            self.desired.all_by_tasks().map(|(_, other)| other).filter(|other| other.name == volume.name);
        selinux::conflict(
            &volume.spec_name,
            volume.label.as_deref(),
            others.map(|other| other.label.as_deref()),
        )
    }

    /// Forgets a directory without metadata that belongs to a volume which is going to be mounted, which
    /// writes the metadata. A disk that was found under another name keeps its mounts: they are there even if
    /// the pod is released before it is mounted again.
    fn supersede(&mut self, pod: &PodUid, resolved: &Resolved, form: &Form) {
        let spec_name = &resolved.desired.spec_name;
        let mut unknown = vec![VolumeName::of_pod(PLUGIN, pod, spec_name)];
        match form {
            Form::FileSystem { global_mount: Some(path) } => {
                unknown.push(VolumeName::shared(PLUGIN, &path.display().to_string()));
            }
            Form::FileSystem { global_mount: None } => {}
            Form::Block { spec_name } => {
                unknown.push(VolumeName::shared(PLUGIN, &format!("volumeDevices/{spec_name}")));
            }
            // The directories of a disk may give it another name.
            Form::InTree { plugin, device, .. } if plugin.is_disk() => {
                let of_directories = [
                    VolumeName::of_pod(plugin.name(), pod, spec_name),
                    in_tree::name_on_disk(*plugin, device),
                ];
                for name in of_directories.iter().filter(|name| **name != resolved.desired.name) {
                    self.actual.rename(name, &resolved.desired.name, pod);
                    self.operations.renamed(name, &resolved.desired.name);
                }
                if self.node.attached.contains(&resolved.desired.name)
                    && self.actual.volume(&resolved.desired.name).is_some()
                {
                    self.actual.attached(&resolved.desired);
                }
                return;
            }
            // The directories of these volumes have no metadata.
            Form::InTree { .. } => return,
        }
        for name in unknown.into_iter().filter(|name| *name != resolved.desired.name) {
            if self.actual.volume(&name).is_none() {
                continue;
            }
            // The directory may be in removal: a mount waits for its end, and creates the directory again.
            self.operations.renamed(&name, &resolved.desired.name);
            self.errors.retain(|key, _| key.volume != name);
            self.unreadable.remove(&name);
            self.actual.unmounted(&name, pod);
            self.actual.device_unmounted(&name);
            self.actual.detached(&name);
        }
    }

    /// Makes the volumes of a pod undesired.
    pub(crate) fn release(&mut self, pod: &PodUid) {
        self.desired.remove(pod);
        self.volumes.retain(|(owner, _), _| owner != pod);
        self.unresolved.retain(|(owner, _), _| owner != pod);
        self.needed.remove(pod);
        if let Some(open) = self.open.remove(pod) {
            open.cancel();
        }
    }

    /// Records the first declaration of a volume.
    pub(crate) fn need(&mut self, pod: &PodUid, name: &str, wall: Timestamp) {
        let of_pod = self.needed.entry(pod.clone()).or_default();
        if !of_pod.contains_key(name) {
            of_pod.insert(name.to_owned(), wall);
        }
    }

    /// Returns when a volume was first declared by its pod.
    pub(crate) fn needed_since(&self, pod: &PodUid, name: &str) -> Option<Timestamp> {
        self.needed.get(pod)?.get(name).copied()
    }

    /// Returns the error of a pod that waits for its unmounts, with the last error of one of them.
    pub(crate) fn still_mounted(&self, pod: &PodUid) -> StillMounted {
        let last = self.errors.iter().find(|(key, _)| key.pod.as_ref() == Some(pod));
        let cause = last.map_or(TIMED_OUT, |(_, (error, _))| error.as_str());
        let text = still_mounted(&self.actual, pod, cause);
        let text = text.unwrap_or_else(|| format!("volumes may still be mounted: {cause}"));
        StillMounted { text, retry_after: None }
    }

    /// Returns whether an operation for a pod is in flight, or the pod may have mounts.
    pub(crate) fn may_have_mounts(&self, pod: &PodUid) -> bool {
        self.actual.may_have_mounts(pod) || self.running.values().any(|job| job.pod.as_ref() == Some(pod))
    }

    /// Returns what a pod's volumes wait for: the last error of an operation, the step in flight, or the
    /// attachment by the controller.
    pub(crate) fn progress(&self, pod: &PodUid) -> Option<String> {
        let names: BTreeSet<&VolumeName> =
            self.desired.volumes_of(pod).map(|(_, volume)| &volume.name).collect();
        let is_of_pod = |key: &OperationKey| {
            names.contains(&key.volume) && key.pod.as_ref().is_none_or(|other| other == pod)
        };
        if let Some((_, (error, _))) = self.errors.iter().find(|(key, _)| is_of_pod(key)) {
            return Some(error.clone());
        }
        if let Some((key, running)) = self.running.iter().find(|(key, _)| is_of_pod(key)) {
            return Some(format!("{} of volume \"{}\" in progress", running.step?.name(), key.volume));
        }
        let is_unattached = |volume: &&DesiredVolume| {
            volume.reach == Reach::Attachable && !self.node.attached.contains(&volume.name)
        };
        let volume = self.desired.volumes_of(pod).map(|(_, volume)| volume).find(is_unattached)?;
        Some(format!("volume {:?} is not attached according to the node's status", volume.spec_name))
    }

    pub(crate) fn volumes_of<'a>(&'a self, pod: &'a PodUid) -> impl Iterator<Item = &'a Arc<Resolved>> {
        self.volumes.iter().filter(move |((owner, _), _)| owner == pod).map(|(_, volume)| volume)
    }

    pub(crate) fn volume(&self, pod: &PodUid, spec_name: &str) -> Option<&Arc<Resolved>> {
        self.volumes.get(&(pod.clone(), spec_name.to_owned()))
    }

    /// Removes the back-off of a driver's volumes.
    pub(crate) fn driver_registered(&mut self, driver: &str) {
        let of_driver: BTreeSet<VolumeName> = self
            .volumes
            .values()
            .filter(|volume| volume.provided.source.driver() == Some(driver))
            .map(|volume| volume.desired.name.clone())
            .collect();
        let prefix = format!("{PLUGIN}/{driver}^");
        self.operations.retain(|name| !of_driver.contains(name) && !name.as_str().starts_with(&prefix));
    }

    /// Compares the states, and returns the jobs to start and the time of the next comparison.
    pub(crate) fn plan(&mut self, now: Instant) -> (Vec<(Operation, Job)>, Option<Instant>) {
        let ReconcilePlan { start, attached, detached, next } =
            reconcile(&self.desired, &self.actual, &self.operations, &self.node, now);
        for volume in &attached {
            self.actual.attached(volume);
        }
        for name in &detached {
            self.detached(name);
        }
        let mut jobs = Vec::new();
        for operation in start {
            let Some(job) = self.job(&operation) else { continue };
            let key = operation.key();
            self.operations.started(key.clone(), operation.kind());
            if let Some((volume, pod)) = operation.turn() {
                self.operations.took_turn(volume, pod);
            }
            let pod = match &job {
                Job::Mount { pod, .. } | Job::Unmount { pod, .. } | Job::Expand { pod, .. } => {
                    Some(pod.clone())
                }
                Job::UnmountDevice { .. } | Job::Attach { .. } | Job::Detach => None,
            };
            self.running.insert(key, Running { pod, step: None, since: now });
            jobs.push((operation, job));
        }
        (jobs, next)
    }

    fn job(&self, operation: &Operation) -> Option<Job> {
        match operation {
            Operation::Mount { volume, pod, mounted_before, device } => {
                let resolved = Arc::clone(self.volume(pod, &volume.spec_name)?);
                let is_staged = self.actual.volume(&volume.name).and_then(|volume| volume.device)
                    == Some(pod_sync_volume_reconcile::actual::MountState::Mounted);
                Some(Job::Mount {
                    pod: pod.clone(),
                    is_taken: resolved.provided.is_for_one_pod
                        && self.actual.is_mounted_elsewhere(&volume.name, pod),
                    volume: resolved,
                    stage: *device && !is_staged,
                    failed_before: self
                        .actual
                        .volume(&volume.name)
                        .is_some_and(|volume| volume.expansion_failed),
                    mounted_before: *mounted_before,
                    released: self.open.get(pod).cloned().unwrap_or_default(),
                })
            }
            Operation::Unmount { volume, pod } => {
                let spec_name = self.actual.mount(volume, pod)?.spec_name.clone();
                Some(Job::Unmount { pod: pod.clone(), form: self.form(volume), spec_name })
            }
            Operation::UnmountDevice { volume } => Some(Job::UnmountDevice { form: self.form(volume) }),
            Operation::Attach { volume } => {
                let volumes = self.volumes.values().filter(|resolved| resolved.desired.name == *volume);
                Some(Job::Attach { volumes: volumes.map(Arc::clone).collect() })
            }
            Operation::Detach { .. } => Some(Job::Detach),
            Operation::Expand { volume, pod } => Some(Job::Expand {
                pod: pod.clone(),
                volume: Arc::clone(self.volume(pod, &volume.spec_name)?),
                failed_before: self.actual.volume(&volume.name).is_some_and(|volume| volume.expansion_failed),
            }),
        }
    }

    /// Forgets a volume that no pod has and that is not attached, or that a controller detaches.
    fn detached(&mut self, name: &VolumeName) {
        self.actual.detached(name);
        if self.actual.volume(name).is_none() && !self.desired.has_volume(name) {
            self.forms.remove(name);
            self.plugins.remove(name);
            self.unreadable.remove(name);
            self.errors.retain(|key, _| key.volume != *name);
            self.operations.retain(|other| other != name);
        }
    }

    /// Returns the size of a volume's claim in bytes, when the pod was declared.
    fn claimed(&self, pod: &PodUid, spec_name: &str) -> Option<u64> {
        Some(self.volume(pod, spec_name)?.provided.sizes.as_ref()?.claimed)
    }

    /// Takes in the result of an expansion.
    fn expanded(&mut self, volume: &DesiredVolume, result: &Result<Expanded, NotExpanded>) {
        let name = &volume.name;
        match result {
            Ok(Expanded::Done(size)) => {
                self.actual.resized(name, *size);
                if volume.size.is_some_and(|wanted| *size < wanted) {
                    self.actual.set_expansion(name, Expansion::Postponed);
                }
            }
            Ok(Expanded::NotRequested) => self.actual.set_expansion(name, Expansion::Postponed),
            Ok(Expanded::InUse) => self.actual.set_expansion(name, Expansion::RefusedInUse),
            Err(NotExpanded { is_final: true, .. }) => self.actual.expansion_failed(name),
            Err(NotExpanded { is_final: false, .. }) => {}
        }
    }

    fn form(&self, volume: &VolumeName) -> Form {
        self.forms.get(volume).cloned().unwrap_or(Form::FileSystem { global_mount: None })
    }

    /// Takes in the result of an operation.
    pub(crate) fn done(&mut self, operation: &Operation, done: Done, now: Instant, wall: Timestamp) {
        let key = operation.key();
        self.running.remove(&key);
        let mut error = None;
        match (operation, done) {
            (Operation::Mount { volume, pod, .. }, Done::Mount(mounted)) => {
                if let Some(expansion) = &mounted.expansion {
                    self.expanded(volume, expansion);
                }
                match mounted.device {
                    Some(Ok(())) => self.actual.device_mounted(&volume.name),
                    Some(Err(certainty)) => self.actual.device_mount_failed(&volume.name, certainty),
                    None => {}
                }
                if mounted.device.is_some() {
                    self.actual.set_device_label(&volume.name, volume.label.clone());
                }
                match mounted.result {
                    Ok(()) => {
                        self.actual.mounted(volume, pod);
                        if let Some(claimed) = self.claimed(pod, &volume.spec_name) {
                            self.actual.initialize_size(&volume.name, claimed);
                        }
                    }
                    Err(failure) => {
                        self.actual.mount_failed(volume, pod, failure.certainty);
                        error = Some(failure.message);
                    }
                }
            }
            (Operation::Unmount { volume, pod }, Done::Unmount(result)) => match result {
                Ok(()) => self.actual.unmounted(volume, pod),
                Err(text) => {
                    self.actual.unmount_failed(volume, pod);
                    error = Some(format!("UnmountVolume.TearDown failed for volume \"{volume}\" : {text}"));
                }
            },
            (Operation::UnmountDevice { volume }, Done::UnmountDevice(result)) => match result {
                Ok(()) => self.actual.device_unmounted(volume),
                Err(text) => {
                    self.actual.device_unmount_failed(volume);
                    error = Some(format!("UnmountDevice failed for volume \"{volume}\" : {text}"));
                }
            },
            (Operation::Attach { .. }, Done::NotAttached(text)) => error = Some(text),
            (Operation::Detach { volume }, Done::Detached) => self.detached(volume),
            (Operation::Expand { volume, .. }, Done::Expanded(result)) => {
                self.expanded(volume, &result);
                error = result.err().map(|failure| failure.text);
            }
            // A job has the result of its operation.
            (
                _,
                Done::Mount(_)
                | Done::Unmount(_)
                | Done::UnmountDevice(_)
                | Done::NotAttached(_)
                | Done::Detached
                | Done::Expanded(_),
            ) => {}
        }
        match error {
            None => {
                self.operations.succeeded(&key);
                self.errors.remove(&key);
            }
            Some(error) => {
                let text = self.operations.failed(&key, &error, now, wall);
                tracing::info!(text, "volume operation failed, retrying");
                if self.actual.volume(&key.volume).is_some() || self.desired.has_volume(&key.volume) {
                    self.errors.insert(key, (error, wall));
                }
            }
        }
    }

    /// Takes in an operation whose task panicked.
    pub(crate) fn panicked(&mut self, operation: &Operation, message: &str, now: Instant, wall: Timestamp) {
        let done = match operation {
            Operation::Mount { volume, .. } => Done::Mount(Mounted {
                expansion: None,
                device: volume.reach.is_shared().then_some(Err(Certainty::Uncertain)),
                result: Err(crate::work::Failure {
                    reason: "FailedMount",
                    message: message.to_owned(),
                    certainty: Certainty::Uncertain,
                }),
            }),
            Operation::Unmount { .. } => Done::Unmount(Err(message.to_owned())),
            Operation::Attach { .. } => Done::NotAttached(message.to_owned()),
            Operation::Expand { .. } => Done::Expanded(Err(message.to_owned().into())),
            Operation::UnmountDevice { .. } | Operation::Detach { .. } => {
                Done::UnmountDevice(Err(message.to_owned()))
            }
        };
        self.done(operation, done, now, wall);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use k8s_openapi::api::core::v1::PersistentVolume;
    use pod_sync_volume_reconcile::operations::OperationKind;
    use serde_json::json;

    use super::*;
    use crate::claims::{self, DriverRules, Source};
    use crate::selinux::Labels;

    fn resolved(pod: &PodUid) -> Resolved {
        let object: PersistentVolume = serde_json::from_value(json!({
            "metadata": {"name": "pv"}, "spec": {"csi": {"driver": "d", "volumeHandle": "h"}},
        }))
        .unwrap();
        let (provided, rules) = (claims::of_object(&object, false).unwrap(), DriverRules::of(None));
        let Source::Csi(csi) = &provided.source else { panic!("not of a driver") };
        let desired = claims::desired(pod, &provided, csi, &rules);
        let pod = quintlet_testkit::pods::pod_json(json!({"containers": []}));
        Resolved { pod: Arc::new(pod), desired, provided, rules, labels: Labels::default() }
    }

    #[test]
    fn a_mount_waits_for_the_removal_of_the_same_directory_without_metadata() {
        let (pod, root) = (PodUid::parse("u1").unwrap(), Root::new(Path::new("/r")));
        let staged = root.global_mount("d", "h").unwrap();
        let unknown = VolumeName::shared(PLUGIN, &staged.display().to_string());
        let mut state = ManagerState::default();
        let form = Form::FileSystem { global_mount: Some(staged) };
        state.found(OnDisk {
            forms: BTreeMap::from([(unknown.clone(), form)]),
            devices: vec![unknown.clone()],
            ..OnDisk::default()
        });
        let removal = Operation::UnmountDevice { volume: unknown };
        state.operations.started(removal.key(), OperationKind::UnmountDevice);

        let (resolved, open) = (resolved(&pod), state.open(&pod));
        let mount = OperationKey { volume: resolved.desired.name.clone(), pod: Some(pod.clone()) };
        assert!(!state.operations.is_pending(&mount));
        let resolution =
            Resolution { volumes: BTreeMap::from([("data".to_owned(), resolved)]), errors: Vec::new() };
        let wall = Timestamp::UNIX_EPOCH;
        state.declare(&pod, resolution, &open, &root, wall);
        assert!(state.operations.is_pending(&mount));

        let done = Done::UnmountDevice(Err("is mounted, but its driver is unknown".to_owned()));
        state.done(&removal, done, Instant::now(), wall);
        assert!(!state.operations.is_pending(&mount));
        assert_eq!(state.errors, BTreeMap::new(), "of a volume that nobody has");
    }
}
