//! Disks that the node agent attaches: iSCSI and Fibre Channel ([`iscsi`] and [`fc`]).
//!
//! | step | iscsi | fc |
//! |---|---|---|
//! | attach | write `iscsi.json`, log in to the target, scan its LUN, wait for the device | search the device, scan the SCSI hosts |
//! | stage | make a file system if the device has none; mount it | the same |
//! | publish | bind the global directory | the same |
//! | detach | remove the devices of the LUN, log out of sessions without another volume | flush and remove the devices |
//!
//! The global directory exists before the first effect on the machine, and until the last one is undone.
//! After a restart it names the disk, so that a process that ends in between is replaced by one that
//! completes the work.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quintlet_kit::failpoint::step;
use quintlet_kit::{mount_table, task};
use quintlet_model::ids::PodUid;
use rustix::mount::UnmountFlags;
use tokio::time::Instant;

use crate::commands::{self, Ended, Until};
use crate::disk_directory::{is_own_file, others, read_disk, remove_directory, write_disk};
use crate::error::Error;
use crate::fc;
use crate::host::{Session, entries, name_of};
use crate::iscsi::{self, Chap, DISCOVERY_KEYS, Disk, SESSION_KEYS, arguments};
use crate::mount::{Mounter, make_directory};
use crate::volume::{Plugin, Source, Volume};

/// Interval between looks for a device.
const POLL: Duration = Duration::from_secs(1);
/// Passes over the portals of a disk (`maxAttachAttempts`).
const MOST_ATTEMPTS: u32 = 5;
/// Passes after which two paths suffice (`minAttachAttempts`).
const FEWEST_ATTEMPTS: u32 = 2;
/// Paths that make a multipath device (`minMultipathCount`).
const FEWEST_PATHS: usize = 2;
/// Limit of `multipath` and `blockdev`, which wait for I/O.
const FLUSH_LIMIT: Duration = Duration::from_secs(60);

/// Exit codes of iscsiadm.
mod exit {
    /// No such session.
    pub(super) const NO_SESSION: i32 = 2;
    /// Another process has logged in.
    pub(super) const SESSION_EXISTS: i32 = 15;
    /// No such record.
    pub(super) const NO_OBJECTS: i32 = 21;
}

impl Mounter {
    /// Attaches the disk of a volume, and returns its device (`WaitForAttach`). Returns `None` for a volume
    /// without a disk, and for a file system that is mounted already.
    ///
    /// # Errors
    /// The device cannot be found. The global directory may exist then: call [`Mounter::detach`] if no pod
    /// needs the volume.
    pub async fn attach(&self, volume: &Volume, chap: &Chap) -> Result<Option<PathBuf>, Error> {
        let plugin = volume.plugin();
        if !plugin.is_disk() {
            return Ok(None);
        }
        let directory = self.paths.disk(plugin, volume.is_block, &volume.device_name())?;
        if !volume.is_block {
            let at = directory.clone();
            if task::blocking(move || crate::mount::is_mounted(&at)).await? {
                return Ok(None);
            }
        }
        let device = match &volume.source {
            Source::Iscsi(source) => {
                let login = Login {
                    mounter: self,
                    disk: source.disk(&volume.name),
                    chap,
                    chap_discovery: source.chap_discovery,
                    chap_session: source.chap_session,
                };
                login.attach(source.lun, directory).await?
            }
            Source::Fc(source) => {
                let disk = source.disk().ok_or(Error::NoDisk("mounter"))?;
                let host = self.host.clone();
                step!("fc disk searched", task::blocking(move || search_fc(&host, &disk)))?
            }
            Source::Local { .. } | Source::HostPath { .. } | Source::Nfs { .. } => return Ok(None),
        };
        Ok(Some(device))
    }

    /// Mounts the device of a disk in its global directory (`MountDevice`).
    pub(crate) async fn stage_disk(
        &self,
        volume: &Volume,
        device: &Path,
        label: Option<&str>,
    ) -> Result<(), Error> {
        let target = self.paths.disk(volume.plugin(), false, &volume.device_name())?;
        let at = target.clone();
        if task::blocking(move || crate::mount::is_mounted(&at)).await? {
            return Ok(());
        }
        let at = target.clone();
        step!("directory of disk created", task::blocking(move || make_directory(&at)))?;
        let fs_type = match &volume.source {
            Source::Iscsi(source) => source.fs_type.clone(),
            Source::Fc(source) => source.fs_type.clone(),
            Source::Local { .. } | Source::HostPath { .. } | Source::Nfs { .. } => None,
        };
        let fs_type = fs_type.filter(|fs_type| !fs_type.is_empty());
        let device = device.display().to_string();
        step!("disk mounted", self.format_and_mount(volume, &device, &target, fs_type.as_deref(), label))
    }

    /// Unmounts a disk that no pod has, and detaches it from the machine (`UnmountDevice`, `TearDownDevice`).
    /// `name` is the path of its global directory below that of the plugin. Does nothing if the directory
    /// does not exist.
    ///
    /// # Errors
    /// A pod has the volume, the mount is busy, or the disk could not be detached. The directory stays.
    pub async fn detach(&self, plugin: Plugin, is_block: bool, name: &str) -> Result<(), Error> {
        let directory = self.paths.disk(plugin, is_block, name)?;
        let at = directory.clone();
        let pods = self.paths.pods();
        let host = self.host.clone();
        let unmounted = task::blocking(move || unmount(&at, &pods, is_block, &host));
        let Some(was_mounted) = step!("disk unmounted", unmounted)? else { return Ok(()) };
        let detached = match plugin {
            Plugin::Iscsi => self.detach_iscsi(&directory, name).await.map_err(|(source, output)| {
                tracing::info!(output, "iscsi disk was not detached");
                source
            }),
            Plugin::Fc => self.detach_fc(name, was_mounted).await,
            Plugin::Local | Plugin::HostPath | Plugin::Nfs => Ok(()),
        };
        detached.map_err(|source| Error::Detach {
            plugin: if plugin == Plugin::Fc { "fc" } else { "iscsi" },
            path: directory.clone(),
            source: Box::new(source),
        })?;
        let has_own_parent =
            plugin == Plugin::Iscsi && Disk::of_directory(name).is_some_and(|d| d.names_own_iface());
        let remove = move || remove_directory(&directory, has_own_parent);
        step!("directory of disk removed", task::blocking(remove))
    }

    async fn detach_fc(&self, name: &str, was_mounted: Option<String>) -> Result<(), Error> {
        let (host, disk) = (self.host.clone(), fc::Disk::of_directory(name));
        let found = task::blocking(move || -> Result<_, Error> {
            let mut devices: BTreeSet<String> = was_mounted.into_iter().collect();
            if let Some(disk) = disk {
                devices.extend(fc_devices(&host, &disk).into_iter().map(|(_, name)| name));
            }
            let mounts = mounts()?;
            let (mut maps, mut disks) = (BTreeSet::new(), BTreeSet::new());
            for device in devices {
                if host.is_mounted(&device, &mounts) {
                    tracing::warn!(device, "fc device is mounted elsewhere, and stays");
                    continue;
                }
                let map = host.multipath_of(&host.dev.join(&device)).map(|map| name_of(&map));
                match map {
                    Some(map) => {
                        disks.extend(host.slaves_of(&map));
                        maps.insert(map);
                    }
                    None => drop(disks.insert(device)),
                }
            }
            Ok((maps, disks))
        });
        let (maps, disks) = found.await?;
        for map in maps {
            let path = self.host.dev.join(&map);
            let arguments = [OsString::from("-f"), path.clone().into()];
            let flush = commands::run(&*self.commands, "multipath", &arguments, Until::Limit(FLUSH_LIMIT));
            let ended = step!("multipath device flushed", flush)?;
            if ended.code != Some(0) {
                let command = format!("failed to flush multipath device {}", path.display());
                return Err(Error::Command { command, cause: ended.cause(), output: ended.output });
            }
        }
        for disk in disks {
            let arguments = [OsString::from("--flushbufs"), self.host.dev.join(&disk).into()];
            // As in the kubelet, a device that cannot be flushed is removed.
            match commands::run(&*self.commands, "blockdev", &arguments, Until::Limit(FLUSH_LIMIT)).await {
                Ok(Ended { code: Some(0), .. }) => {}
                Ok(ended) => tracing::warn!(disk, output = ended.output, "failed to flush a device"),
                Err(error) => tracing::warn!(disk, %error, "failed to flush a device"),
            }
            self.delete_device(disk).await?;
        }
        Ok(())
    }

    async fn delete_device(&self, name: String) -> Result<(), Error> {
        let host = self.host.clone();
        let delete = move || {
            let file = host.sys.join("block").join(&name).join("device/delete");
            host.delete(&name).map_err(Error::file("write", &file))
        };
        step!("disk removed", task::blocking(delete))
    }

    /// Detaches an iSCSI disk. The output of a failed command comes apart from the error, as the kubelet's
    /// text does not have it.
    async fn detach_iscsi(&self, directory: &Path, name: &str) -> Result<(), (Error, String)> {
        let disk = read_disk(directory).await.or_else(|| Disk::of_directory(name));
        let failed = |error: Error| (error, String::new());
        // A directory that names no disk has no session.
        let Some(disk) = disk else { return Ok(()) };
        let lun = disk.lun.parse::<i32>().map_err(|_| failed(Error::Lun(disk.lun.clone())))?;
        let (host, iqn) = (self.host.clone(), disk.iqn.clone());
        let devices = task::blocking(move || -> Result<_, Error> {
            let sessions = sessions(&host, &iqn)?;
            let of_lun = sessions.iter().filter_map(|session| session.devices.get(&lun)).flatten();
            let devices: BTreeSet<String> = of_lun.cloned().collect();
            let mounts = mounts()?;
            let is_mounted = devices.iter().any(|device| host.is_mounted(device, &mounts));
            let maps = devices.iter().filter_map(|device| host.multipath_of(&host.dev.join(device)));
            let maps: BTreeSet<PathBuf> = maps.collect();
            Ok((devices, maps, is_mounted))
        });
        let (devices, maps, is_mounted) = devices.await.map_err(failed)?;
        if is_mounted {
            tracing::warn!(iqn = disk.iqn, lun, "iscsi device is mounted elsewhere, and stays");
            return Ok(());
        }
        for map in maps {
            let arguments = [OsString::from("-f"), map.clone().into()];
            match commands::run(&*self.commands, "multipath", &arguments, Until::Limit(FLUSH_LIMIT)).await {
                Ok(Ended { code: Some(0), .. }) => {}
                Ok(ended) => tracing::warn!(?map, output = ended.output, "failed to flush a device"),
                Err(error) => tracing::warn!(?map, %error, "failed to flush a device"),
            }
        }
        for device in devices {
            // A logout removes the device as well.
            if let Err(error) = self.delete_device(device).await {
                tracing::warn!(%error, "failed to remove a device");
            }
        }
        self.log_out(directory, &disk).await
    }

    /// Logs out of the sessions of a disk that no other volume uses, and deletes their records.
    async fn log_out(&self, directory: &Path, disk: &Disk) -> Result<(), (Error, String)> {
        let failed = |error: Error| (error, String::new());
        let lock = self.targets.of(&disk.iqn);
        let _logged_in_by_nobody_else = lock.lock().await;
        let host = self.host.clone();
        let iqn = disk.iqn.clone();
        let own = directory.to_owned();
        let roots = [false, true].map(|is_block| self.paths.disks(Plugin::Iscsi, is_block));
        let read = task::blocking(move || -> Result<_, Error> {
            Ok((sessions(&host, &iqn)?, others(&roots, &own, &iqn)?))
        });
        let (sessions, others) = read.await.map_err(failed)?;
        let portals: BTreeSet<&String> = disk.portals.iter().filter(|portal| !portal.is_empty()).collect();
        let mut is_kept = false;
        for portal in portals {
            let of_portal = sessions.iter().filter(|session| session.portals.contains(portal));
            let luns = of_portal.clone().flat_map(|session| session.devices.keys()).map(i32::to_string);
            if iscsi::is_busy(portal, &luns.collect(), &others) {
                is_kept = true;
                continue;
            }
            for (work, arguments) in [
                ("log out of", arguments::logout(disk, portal)),
                ("delete the record of", arguments::delete_node(disk, portal)),
            ] {
                let ended = step!("iscsi target logged out", self.iscsiadm(&arguments));
                match ended {
                    Err(Error::NoCommand(_)) if sessions.is_empty() => return Ok(()),
                    Err(error) => return Err(failed(error)),
                    Ok(ended) if is_done(&ended) => {}
                    Ok(ended) => {
                        let output = format!("failed to {work} target: {}", ended.output);
                        return Err((Error::Exit(ended.cause()), output));
                    }
                }
            }
        }
        if disk.has_own_iface() && !is_kept {
            let ended = self.iscsiadm(&arguments::iface(&disk.iface, "delete")).await.map_err(failed)?;
            if !is_done(&ended) {
                return Err((Error::Exit(ended.cause()), ended.output));
            }
        }
        Ok(())
    }

    /// Runs iscsiadm. Its arguments may have credentials, and are not logged.
    async fn iscsiadm(&self, arguments: &[String]) -> Result<Ended, Error> {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        commands::run(&*self.commands, "iscsiadm", &arguments, Until::Limit(self.host.limits.iscsiadm)).await
    }
}

/// Returns whether a logout or removal succeeded, or had nothing to do.
fn is_done(ended: &Ended) -> bool {
    matches!(ended.code, Some(0 | exit::NO_SESSION | exit::NO_OBJECTS))
}

/// The attachment of an iSCSI disk.
struct Login<'a> {
    mounter: &'a Mounter,
    disk: Disk,
    chap: &'a Chap,
    chap_discovery: bool,
    chap_session: bool,
}

impl Login<'_> {
    /// Logs in to all portals, and returns the device of a LUN (`AttachDisk`).
    async fn attach(&self, lun: i32, directory: PathBuf) -> Result<PathBuf, Error> {
        let disk = &self.disk;
        let record = self.run(&arguments::iface(&disk.init_iface, "show")).await?;
        if record.code != Some(0) {
            tracing::info!(iface = disk.init_iface, output = record.output, "interface cannot be read");
            return Err(Error::Exit(record.cause()));
        }
        let transport = iscsi::transport(&record.output).map(str::to_owned);
        let (at, file) = (directory, disk.clone());
        step!("iscsi configuration written", task::blocking(move || write_disk(&at, &file)))?;
        if !disk.initiator_name.is_empty() {
            step!("iscsi interface copied", self.copy_iface(&record.output))?;
        }
        let lock = self.mounter.targets.of(&disk.iqn);
        let _one_login_per_target = lock.lock().await;
        let mut sessions = self.sessions().await?;
        let (mut devices, mut last) = (BTreeMap::new(), None);
        for attempt in 1..=MOST_ATTEMPTS {
            for portal in &disk.portals {
                if devices.contains_key(portal) {
                    continue;
                }
                if host_of(&sessions, portal).is_none() {
                    if let Err(error) = step!("iscsi target logged in", self.log_in(portal)) {
                        match error {
                            Error::Iscsi(text) => last = Some(text),
                            other => return Err(other),
                        }
                        continue;
                    }
                    sessions = self.sessions().await?;
                }
                let Some(host) = host_of(&sessions, portal) else { continue };
                let scanned_host = self.mounter.host.clone();
                let scan = task::blocking(move || {
                    let file = scanned_host.sys.join(format!("class/scsi_host/host{host}/scan"));
                    scanned_host.scan_lun(host, lun).map_err(Error::file("write", &file))
                });
                step!("iscsi lun scanned", scan)?;
                let Some(transport) = &transport else { return Err(Error::NoTransport(disk.iface.clone())) };
                match self.wait_for_device(portal, transport).await? {
                    Ok(device) => drop(devices.insert(portal, device)),
                    Err(text) => last = Some(text),
                }
            }
            if devices.is_empty() {
                if disk.has_own_iface() {
                    let _best_effort = self.run(&arguments::iface(&disk.iface, "delete")).await;
                }
                let last = last.unwrap_or_else(|| "<nil>".to_owned());
                return Err(Error::Iscsi(format!(
                    "failed to get any path for iscsi disk, last err seen:\n{last}"
                )));
            }
            let is_enough = devices.len() >= FEWEST_PATHS && attempt >= FEWEST_ATTEMPTS;
            if disk.portals.iter().all(|portal| devices.contains_key(portal)) || is_enough {
                break;
            }
        }
        if let Some(last) = last {
            tracing::info!(iqn = disk.iqn, error = last, "not all portals of an iscsi disk are usable");
        }
        // The first portal's device is used without multipathd.
        let first = disk.portals.iter().find_map(|portal| devices.get(portal)).cloned();
        let devices: Vec<PathBuf> = devices.into_values().collect();
        match self.wait_for_multipath(devices).await {
            Some(map) => Ok(map),
            None => first.ok_or_else(|| Error::Iscsi("no iscsi device found".to_owned())),
        }
    }

    async fn run(&self, arguments: &[String]) -> Result<Ended, Error> {
        let ended = self.mounter.iscsiadm(arguments).await?;
        Ok(Ended { output: self.chap.redact(&ended.output), ..ended })
    }

    async fn sessions(&self) -> Result<Vec<Session>, Error> {
        let (host, iqn) = (self.mounter.host.clone(), self.disk.iqn.clone());
        task::blocking(move || sessions(&host, &iqn)).await
    }

    /// Makes an interface record with this volume's initiator name (`cloneIface`).
    async fn copy_iface(&self, record: &str) -> Result<(), Error> {
        let disk = &self.disk;
        if disk.init_iface == disk.iface {
            let text = format!("iscsi: cannot clone iface with same name: {}", disk.init_iface);
            return Err(Error::Iscsi(text));
        }
        let mut settings = iscsi::settings(record).map_err(|error| {
            Error::Iscsi(format!("iscsi: failed to parse iface records: {record} ({error})"))
        })?;
        settings.insert("iface.initiatorname".to_owned(), disk.initiator_name.clone());
        let made = self.run(&arguments::iface(&disk.iface, "new")).await?;
        if !matches!(made.code, Some(0 | exit::SESSION_EXISTS)) {
            let (cause, output) = (made.cause(), made.output);
            return Err(Error::Iscsi(format!("iscsi: failed to create new iface: {output} ({cause})")));
        }
        for (key, value) in settings {
            let set = self.run(&arguments::set_iface(&disk.iface, &key, &value)).await?;
            if set.code != Some(0) {
                let _best_effort = self.run(&arguments::iface(&disk.iface, "delete")).await;
                let cause = set.cause();
                let output = set.output;
                let iface = &disk.init_iface;
                let text = format!(
                    "iscsi: failed to update iface records: {output} ({cause}). iface({iface}) will be used"
                );
                return Err(Error::Iscsi(text));
            }
        }
        Ok(())
    }

    /// Discovers the target at a portal, and logs in. An error of [`Error::Iscsi`] is that of the portal
    /// alone.
    async fn log_in(&self, portal: &str) -> Result<(), Error> {
        let (disk, failed) = (&self.disk, |text: String| Err(Error::Iscsi(text)));
        // A record that exists is used as it is.
        self.run(&arguments::discovery(disk, portal, "new")).await?;
        if self.chap_discovery
            && let Err(text) = self.set_chap(&DISCOVERY_KEYS, portal).await?
        {
            return failed(format!("iscsi: failed to update discoverydb to portal {portal} error: {text}"));
        }
        let found = self.run(&arguments::discover(disk, portal)).await?;
        if found.code != Some(0) {
            self.run(&arguments::discovery(disk, portal, "delete")).await?;
            let (cause, output) = (found.cause(), found.output);
            return failed(format!(
                "iscsi: failed to sendtargets to portal {portal} output: {output}, err {cause}"
            ));
        }
        let manual = self.run(&arguments::set_node(disk, portal, "node.session.scan", "manual")).await?;
        if manual.code != Some(0) {
            tracing::warn!(portal, output = manual.output, "iscsi session scans all LUNs of its target");
        }
        if self.chap_session
            && let Err(text) = self.set_chap(&SESSION_KEYS, portal).await?
        {
            return failed(format!("iscsi: failed to update iscsi node to portal {portal} error: {text}"));
        }
        let login = self.run(&arguments::login(disk, portal)).await?;
        // Another process may have logged in.
        if !matches!(login.code, Some(0 | exit::SESSION_EXISTS)) {
            self.run(&arguments::delete_node(disk, portal)).await?;
            let (cause, output) = (login.cause(), login.output);
            return failed(format!("iscsi: failed to attach disk: Error: {output} ({cause})"));
        }
        // A login while the machine starts would delay it.
        let startup = self.run(&arguments::set_node(disk, portal, "node.startup", "manual")).await?;
        if startup.code != Some(0) {
            tracing::warn!(portal, output = startup.output, "iscsi session is not set to manual startup");
        }
        Ok(())
    }

    /// Writes credentials to the record of a discovery or a target. The inner error is the kubelet's text.
    async fn set_chap(&self, keys: &[&str; 4], portal: &str) -> Result<Result<(), String>, Error> {
        let is_discovery = keys == &DISCOVERY_KEYS;
        let set = |key: &str, value: &str| match is_discovery {
            true => arguments::set_discovery(&self.disk, portal, key, value),
            false => arguments::set_node(&self.disk, portal, key, value),
        };
        let (method, record, of_key) = match is_discovery {
            true => ("discovery.sendtargets.auth.authmethod", "discoverydb", "discoverydb key"),
            false => ("node.session.auth.authmethod", "node", "node session key"),
        };
        let ended = self.run(&set(method, "CHAP")).await?;
        if ended.code != Some(0) {
            let output = ended.output;
            return Ok(Err(format!("iscsi: failed to update {record} with CHAP, output: {output}")));
        }
        for key in keys {
            let Some(value) = self.chap.0.get(*key).filter(|value| !value.is_empty()) else { continue };
            let ended = self.run(&set(key, value)).await?;
            if ended.code != Some(0) {
                let output = ended.output;
                return Ok(Err(format!("iscsi: failed to update {of_key} {key:?} error: {output}")));
            }
        }
        Ok(Ok(()))
    }

    /// Waits for the link to the device (`waitForPathToExist`). The inner error is the kubelet's text.
    async fn wait_for_device(&self, portal: &str, transport: &str) -> Result<Result<PathBuf, String>, Error> {
        let limit = self.mounter.host.limits.device;
        let end = quintlet_kit::clock::deadline_after(Instant::now(), limit);
        loop {
            let (links, disk) = (self.mounter.host.dev.join("disk/by-path"), self.disk.clone());
            let (portal_name, transport_name) = (portal.to_owned(), transport.to_owned());
            let found = task::blocking(move || -> Result<_, Error> {
                let all = entries(&links).map_err(Error::file("read", &links))?;
                let mut matching =
                    all.into_iter().filter(|p| disk.is_path(&name_of(p), &portal_name, &transport_name));
                // A link may be left of a device that is gone.
                Ok(matching.find(|link| link.exists()))
            });
            if let Some(link) = found.await? {
                return Ok(Ok(link));
            }
            if Instant::now() >= end {
                let portal = portal.replace(['[', ']'], "");
                let Disk { iqn, lun, .. } = &self.disk;
                let prefix = if transport == "tcp" { "ip" } else { "pci-*-ip" };
                let path = format!("/dev/disk/by-path/{prefix}-{portal}-iscsi-{iqn}-lun-{lun}");
                let seconds = limit.as_secs();
                return Ok(Err(format!("Timed out waiting for device at path {path} after {seconds}s")));
            }
            tokio::time::sleep(POLL.min(limit)).await;
        }
    }

    /// Waits for a multipath device if there are several portals, and looks for one otherwise
    /// (`waitForMultiPathToExist`).
    async fn wait_for_multipath(&self, devices: Vec<PathBuf>) -> Option<PathBuf> {
        let limit = match self.disk.portals.len() {
            0 | 1 => Duration::ZERO,
            _ => self.mounter.host.limits.multipath,
        };
        let end = quintlet_kit::clock::deadline_after(Instant::now(), limit);
        loop {
            let (host, paths) = (self.mounter.host.clone(), devices.clone());
            let map = task::blocking(move || paths.iter().find_map(|device| host.multipath_of(device))).await;
            if map.is_some() || Instant::now() >= end {
                return map;
            }
            tokio::time::sleep(POLL.min(limit)).await;
        }
    }
}

fn host_of(sessions: &[Session], portal: &str) -> Option<u32> {
    sessions.iter().find(|session| session.portals.contains(portal)).map(|session| session.host)
}

fn sessions(host: &crate::host::Host, iqn: &str) -> Result<Vec<Session>, Error> {
    host.sessions(iqn).map_err(Error::file("read", &host.sys.join("class/iscsi_host")))
}

fn mounts() -> Result<Vec<mount_table::Mount>, Error> {
    mount_table::read().map_err(Error::file("read", Path::new(mount_table::FILE)))
}

/// Returns the devices of a disk that have links, with their names.
fn fc_devices(host: &crate::host::Host, disk: &fc::Disk) -> Vec<(PathBuf, String)> {
    let links = entries(&host.dev.join("disk").join(disk.links())).unwrap_or_default();
    let links = links.iter().filter(|link| disk.is_link(&name_of(link)));
    links.filter_map(|link| host.device(link)).collect()
}

/// Returns the device of a disk: the one that multipathd made, else any path of the disk (`searchDisk`).
/// Scans the SCSI hosts if there is no multipath device.
fn search_fc(host: &crate::host::Host, disk: &fc::Disk) -> Result<PathBuf, Error> {
    let search = || {
        let devices = fc_devices(host, disk);
        let map = devices.iter().find_map(|(device, _)| host.multipath_of(device));
        (map, devices.into_iter().next().map(|(device, _)| device))
    };
    let (mut map, mut device) = search();
    if map.is_none() {
        host.scan_all();
        (map, device) = search();
    }
    let device = map.or(device).ok_or(Error::NoFcDisk)?;
    match device.exists() {
        true => Ok(device),
        false => Err(Error::NoDevice(device)),
    }
}

/// Unmounts a global directory, unless a pod has the volume. Returns `None` if the directory does not exist,
/// and otherwise the name of the device that was mounted.
fn unmount(
    directory: &Path,
    pods: &Path,
    is_block: bool,
    host: &crate::host::Host,
) -> Result<Option<Option<String>>, Error> {
    if !directory.try_exists().map_err(Error::file("read", directory))? {
        return Ok(None);
    }
    if is_block {
        let bound = entries(directory).map_err(Error::file("read", directory))?;
        let bound = bound.iter().filter(|file| PodUid::parse(&name_of(file)).is_ok() && !is_own_file(file));
        let mounts: Vec<String> = bound.map(|file| file.display().to_string()).collect();
        return match mounts.is_empty() {
            true => Ok(Some(None)),
            false => Err(Error::InUse { path: directory.to_owned(), mounts }),
        };
    }
    let mut device = None;
    loop {
        let mounts = mounts()?;
        let Some(mount) = mounts.iter().rev().find(|mount| mount.path == directory) else {
            return Ok(Some(device));
        };
        let others = mount_table::references(&mounts, directory, pods);
        if !others.is_empty() {
            return Err(Error::InUse { path: directory.to_owned(), mounts: others });
        }
        device = host.name_of_numbers(&mount.device);
        let unmounted = rustix::mount::unmount(directory, UnmountFlags::NOFOLLOW);
        unmounted.map_err(|error| Error::file("unmount", directory)(error.into()))?;
    }
}
