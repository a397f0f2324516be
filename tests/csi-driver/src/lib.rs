//! A CSI driver for tests: directories, tmpfs and loop devices behind real sockets, with faults in any call.
//!
//! The driver is the binary `csi-driver`. It registers like a real driver: a registration socket in
//! `<root>/plugins_registry` and its own socket in `<root>/plugins/<name>`. Volumes survive the process, in
//! its state directory. The file `faults.json` there is read at each call; `calls.log` has a line per call,
//! `registrations.log` one per NotifyRegistrationStatus.

pub mod fault;
mod identity;
mod node;
pub mod process;
mod registration;
pub mod serve;
pub mod thread;
pub mod volumes;

pub use identity::Identity;
pub use node::NodeService;
pub use registration::Registrar;
