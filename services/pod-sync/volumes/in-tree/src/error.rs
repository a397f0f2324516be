//! Errors of operations, with the kubelet's texts.

use std::io;
use std::path::{Path, PathBuf};

/// Reason why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field of the volume is empty or cannot be part of a path.
    #[error("{field} {value:?} cannot be part of a path")]
    Name {
        /// Name of the field.
        field: &'static str,
        /// Content of the field, which is empty or would lead out of the directory.
        value: String,
    },
    /// A `local` volume without a path.
    #[error("local volume source is nil or local path is not set")]
    NoPath,
    /// The path of a `local` volume leads upwards.
    #[error("invalid path: {0} must not contain '..'")]
    Backsteps(String),
    /// The path of a `local` volume does not exist.
    #[error("path {0:?} does not exist")]
    Absent(String),
    /// The path of a `local` volume is neither a directory nor a block device.
    #[error("only directory and block device are supported")]
    NotMountable,
    /// The volume has the mode Block, and its path is something else.
    #[error("{0} is not a block device")]
    NotBlockDevice(String),
    /// The type of a `hostPath` does not match.
    #[error("{0}")]
    HostPath(String),
    /// The plugin has no mount options.
    #[error("mount options are not supported for this volume type")]
    MountOptions,
    /// The plugin has no block volumes.
    #[error("{0} does not support volumeMode Block")]
    NoBlock(&'static str),
    /// The server of an nfs volume would be an option of mount(8).
    #[error("invalid server {0:?} of an nfs volume")]
    Server(String),
    /// A file or directory could not be read or changed.
    #[error("failed to {action} {}: {source}", .path.display())]
    File {
        /// The failed action, a verb.
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// mount(8) failed.
    #[error(
        "mount failed: {cause}\nMounting command: mount\nMounting arguments: {arguments}\nOutput: {output}"
    )]
    Mount {
        /// Exit status of the command.
        cause: String,
        /// Arguments of the command.
        arguments: String,
        /// Output of the command.
        output: String,
    },
    /// mount(8) failed on a device with another file system than that of the volume
    /// (`k8s.io/mount-utils: FilesystemMismatch`).
    #[error("{0}")]
    OtherFileSystem(Box<Error>),
    /// Another command failed.
    #[error("{command} failed: {cause}: {output}")]
    Command {
        /// The failed work.
        command: String,
        /// Exit status of the command.
        cause: String,
        /// Output of the command.
        output: String,
    },
    /// A command is not installed.
    #[error("exec: {0:?}: executable file not found in $PATH")]
    NoCommand(&'static str),
    /// A new disk would have to be formatted to be mounted read-only.
    #[error("cannot mount unformatted disk {0} as we are manipulating it in read-only mode")]
    UnformattedReadOnly(String),
    /// The device of a `local` volume could not be mounted.
    #[error("local: failed to mount device {device} at {} (fstype: {fs_type}), error {source}", .target.display())]
    Device {
        /// Path of the device.
        device: String,
        /// Path of the mount point.
        target: PathBuf,
        /// File system that the volume has.
        fs_type: String,
        /// The error of the mount.
        source: Box<Error>,
    },
    /// A Fibre Channel volume without ports or identifiers.
    #[error("fc: no fc disk information found. failed to make a new {0}")]
    NoDisk(&'static str),
    /// No device of a Fibre Channel volume exists.
    #[error("no fc disk found")]
    NoFcDisk,
    /// A device does not exist.
    #[error("device {} does not exist", .0.display())]
    NoDevice(PathBuf),
    /// The interface record of an iSCSI volume has no transport.
    #[error("could not parse iface file for {0}")]
    NoTransport(String),
    /// The LUN of an iSCSI volume is not a number.
    #[error("lun is not a number: {0}")]
    Lun(String),
    /// A disk could not be attached, with the kubelet's text.
    #[error("{0}")]
    Iscsi(String),
    /// iscsiadm failed.
    #[error("{0}")]
    Exit(String),
    /// The device of a pod's volume is not mounted.
    #[error("no device is mounted at {}", .0.display())]
    NotStaged(PathBuf),
    /// A disk could not be detached.
    #[error("{plugin}: failed to detach disk: {}\nError: {source}", .path.display())]
    Detach {
        /// Name of the plugin.
        plugin: &'static str,
        /// Path of the disk's global directory.
        path: PathBuf,
        /// The error of the step that failed.
        source: Box<Error>,
    },
    /// The format of a device could not be read.
    #[error("ResizeFS.Resize - error checking format for device {device}: {source}")]
    Format {
        /// Path of the device.
        device: String,
        /// The error of the command.
        source: Box<Error>,
    },
    /// A file system that cannot be enlarged.
    #[error("ResizeFS.Resize - resize of format {format} is not supported for device {device} mounted at {}", .mount.display())]
    NoResize {
        /// File system of the device.
        format: String,
        /// Path of the device.
        device: String,
        /// Path of the mount point.
        mount: PathBuf,
    },
    /// A file system could not be enlarged.
    #[error("resize of device {device} failed: {cause}. {program} output: {output}")]
    Resize {
        /// Path of the device.
        device: String,
        /// Exit status of the command.
        cause: String,
        /// Name of the command.
        program: &'static str,
        /// Output of the command.
        output: String,
    },
    /// Pods have the device, so it stays mounted.
    #[error("the device mount path {:?} is still mounted by other references [{}]", .path.display().to_string(), .mounts.join(" "))]
    InUse {
        /// Path of the global directory.
        path: PathBuf,
        /// Paths of the mounts of pods.
        mounts: Vec<String>,
    },
}

impl Error {
    /// Returns whether the mount failed on a device with another file system
    /// (`pkg/volume/util/types: IsFilesystemMismatchError`).
    #[must_use]
    pub fn is_other_file_system(&self) -> bool {
        match self {
            Self::OtherFileSystem(_) => true,
            error => matches!(error, Self::Device { source, .. } if source.is_other_file_system()),
        }
    }

    /// Returns a function that adds what failed to an error of a file.
    pub(crate) fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { action, path, source }
    }
}
