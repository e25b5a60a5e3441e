#pragma once

namespace k3 {

// What this process has open on a local TCP port, seen through its descriptors; these stay with their owners, who find
// out as if the peers had left.
//
// For a gRPC server at its end. Its own shutdown answers a call that arrives meanwhile with CANCELLED, which tells a
// client that somebody gave the call up; a connection that ends says UNAVAILABLE: retry elsewhere.

// Listeners refuse from now on, and connections that wait to be accepted are reset.
void RefuseConnections(int port);

// Accepted connections read an end of stream after what has already arrived. Returns how many were still open.
int EndConnections(int port);

}  // namespace k3
