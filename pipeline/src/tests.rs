mod module_graph;
