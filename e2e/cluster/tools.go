//go:build tools

// Package tools names the programs that the cluster is built from, so that go.mod and go.sum pin them.
package tools

import (
	_ "go.etcd.io/etcd/server/v3"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kubectl"
)
