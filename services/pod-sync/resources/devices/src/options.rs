//! What a container needs to use its devices: the responses of all plugins together
//! (`deviceRunContainerOptions`).

use std::collections::{BTreeMap, BTreeSet};

use pod_sync_cri_config::container::DeviceAdditions;
use prost::Message as _;
use quintlet_cri_api::v1 as cri;
use quintlet_plugin_api::device_plugin::ContainerAllocateResponse;

use crate::allocations::ContainerAllocations;

/// A file of the host that is mounted into a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMount {
    /// Path in the container.
    pub container_path: String,
    /// Path on the host.
    pub host_path: String,
    /// Whether the container may only read.
    pub read_only: bool,
}

/// A file of the host below `/dev`, as the container has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFile {
    /// Path in the container.
    pub container_path: String,
    /// Path on the host.
    pub host_path: String,
    /// Some of `r`, `w` and `m`.
    pub permissions: String,
}

/// The contribution of the devices to the configuration of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Environment variables.
    pub envs: BTreeMap<String, String>,
    /// Mounts, in the order of the resources.
    pub mounts: Vec<DeviceMount>,
    /// Device files, in the order of the resources.
    pub devices: Vec<DeviceFile>,
    /// Annotations of the container for the runtime.
    pub annotations: BTreeMap<String, String>,
    /// Qualified names of CDI devices.
    pub cdi_devices: Vec<String>,
}

impl DeviceOptions {
    /// Merges the responses of a container's plugins. Where two responses have the same variable, annotation
    /// or path, that of the resource whose name is first counts.
    #[must_use]
    pub fn of(allocations: &ContainerAllocations) -> Self {
        let mut options = Self::default();
        let mut mounts = BTreeSet::new();
        let mut devices = BTreeSet::new();
        let mut cdi_devices = BTreeSet::new();
        for (resource, allocation) in allocations {
            let response = match ContainerAllocateResponse::decode(&*allocation.response) {
                Ok(response) => response,
                Err(error) => {
                    tracing::error!(resource, %error, "response of the device plugin in the checkpoint is unusable");
                    continue;
                }
            };
            for (name, value) in response.envs {
                options.envs.entry(name).or_insert(value);
            }
            for (name, value) in response.annotations {
                options.annotations.entry(name).or_insert(value);
            }
            for mount in response.mounts {
                if mounts.insert(mount.container_path.clone()) {
                    options.mounts.push(DeviceMount {
                        container_path: mount.container_path,
                        host_path: mount.host_path,
                        read_only: mount.read_only,
                    });
                }
            }
            for device in response.devices {
                if devices.insert(device.container_path.clone()) {
                    options.devices.push(DeviceFile {
                        container_path: device.container_path,
                        host_path: device.host_path,
                        permissions: device.permissions,
                    });
                }
            }
            let names = response.cdi_devices.into_iter().map(|device| device.name);
            options.cdi_devices.extend(names.filter(|name| cdi_devices.insert(name.clone())));
        }
        options
    }
}

impl From<DeviceOptions> for DeviceAdditions {
    fn from(options: DeviceOptions) -> Self {
        let mount = |mount: DeviceMount| cri::Mount {
            container_path: mount.container_path,
            host_path: mount.host_path,
            readonly: mount.read_only,
            ..cri::Mount::default()
        };
        let device = |file: DeviceFile| cri::Device {
            container_path: file.container_path,
            host_path: file.host_path,
            permissions: file.permissions,
        };
        Self {
            envs: options.envs.into_iter().map(|(name, value)| (name, value.into_bytes())).collect(),
            mounts: options.mounts.into_iter().map(mount).collect(),
            devices: options.devices.into_iter().map(device).collect(),
            annotations: options.annotations,
            cdi_devices: options.cdi_devices,
        }
    }
}

#[cfg(test)]
mod tests {
    use quintlet_plugin_api::device_plugin::{CdiDevice, DeviceSpec, Mount};

    use super::*;
    use crate::allocations::Allocation;

    fn allocation(response: &ContainerAllocateResponse) -> Allocation {
        Allocation { devices: BTreeMap::new(), response: response.encode_to_vec() }
    }

    #[test]
    fn responses_are_merged_and_the_first_of_two_equal_names_counts() {
        let response = |number: &str| ContainerAllocateResponse {
            envs: [("A".to_owned(), number.to_owned()), (format!("ONLY_{number}"), "x".to_owned())].into(),
            annotations: [("a".to_owned(), number.to_owned())].into(),
            mounts: ["/lib", &format!("/lib{number}")]
                .map(|path| Mount {
                    container_path: path.to_owned(),
                    host_path: format!("/host/{number}"),
                    read_only: true,
                })
                .into(),
            devices: vec![DeviceSpec {
                container_path: "/dev/d".to_owned(),
                host_path: format!("/dev/d{number}"),
                permissions: "rw".to_owned(),
            }],
            cdi_devices: vec![
                CdiDevice { name: "a.com/d=0".to_owned() },
                CdiDevice { name: "a.com/d=0".to_owned() },
                CdiDevice { name: format!("a.com/d={number}") },
            ],
        };
        let torn = Allocation { devices: BTreeMap::new(), response: vec![0xff] };
        let allocations = [
            ("a.com/one".to_owned(), allocation(&response("1"))),
            ("a.com/torn".to_owned(), torn),
            ("a.com/two".to_owned(), allocation(&response("2"))),
        ];
        let options = DeviceOptions::of(&allocations.into());
        let envs: Vec<_> = options.envs.iter().map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(envs, ["A=1", "ONLY_1=x", "ONLY_2=x"]);
        assert_eq!(options.annotations, [("a".to_owned(), "1".to_owned())].into());
        let mounts: Vec<_> = options.mounts.iter().map(|m| (&*m.container_path, &*m.host_path)).collect();
        assert_eq!(mounts, [("/lib", "/host/1"), ("/lib1", "/host/1"), ("/lib2", "/host/2")]);
        let devices: Vec<_> = options.devices.iter().map(|d| (&*d.host_path, &*d.permissions)).collect();
        assert_eq!(devices, [("/dev/d1", "rw")]);
        assert_eq!(options.cdi_devices, ["a.com/d=0", "a.com/d=1", "a.com/d=2"]);
    }
}
