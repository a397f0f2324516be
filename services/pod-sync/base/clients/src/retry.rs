//! When a call to another service is repeated.

use std::time::Duration;

/// Interval between attempts to reach another service of this node. An attempt is one connection to a socket
/// of the machine, so it costs little, and a service that was restarted is used again before a person would
/// notice.
pub const SERVICE_RETRY: Duration = Duration::from_millis(100);
